# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline soak`: the real stack on the small task, with faults put in for real, one after another.

    faults.py     what is done to a run, and how one sees that it has recovered
    job.py        the run: started, killed, started again; its processes, its events
    nemesis.py    which fault comes next (seeded), and what the run made of it
    judge.py      the reward function of such a run, which can be told to misbehave
    processes.py  found by an environment variable, however deep
    small_disk.py a disk for checkpoints that can be filled
    command.py    the command line, and what it prints

What must hold afterwards is checked by the auditors that any run has: `core.audit` over the ledger,
`core.event_audit`
over the event log of each process.
"""
