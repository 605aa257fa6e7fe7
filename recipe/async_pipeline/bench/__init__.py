# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench`: our strategies and verl's own trainers side by side, on one machine, in one run.

An *arm* is a trainer with its best settings, a *workload* is where the time goes. Each arm runs as a job of
its own through verl's entry point, with the same probes from outside; the arms take turns (A B C A B C), and
only ratios within one turn count. What a job wrote is reduced by pure functions:

    workload.py   what is generated, what is waited for      arms.py     which trainer, on which devices
    waits.py      seeded latencies                           spans.py    intervals that the probes write
    measure.py    spans of one job -> its figures            bound.py    the best that any schedule could do
    statistics.py medians and paired ratios                  report.py   the table and the JSON
    usage.py      CPU and memory of a process tree           picture.py  the PNG
    runner.py     takes turns, shows progress                command.py  the command line
"""
