# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline soak`: run the toy task on the real stack and inject real faults, one after another.

    faults        the faults, and how recovery from each is detected
    job           the run: start, kill, restart; its processes and events
    nemesis       which fault comes next (seeded), and the report
    misbehaviour  faults of code that users provide: it is requested to misbehave
    judge         the reward function of such a run, which does so
    moods         its environments, which do so, too
    lake_agent    a program that plays over HTTP, which does so, too
    small_disk    a disk for the files of a run that can be filled
    surroundings  faults of a run's screen, terminal, scheduler and clock, and a second launch
    standins      modules in place of services: a tracker that can refuse

The command is `lab/cli/soak.py`. The result is checked by the auditors that every run has:
`tools.ledger.audit` on the ledger, and `core.event_audit` on the event log of each process.
"""
