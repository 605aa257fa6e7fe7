# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench`: compare this package's strategies with verl's trainers on one machine in one run.

An *arm* is a trainer with its best settings. A *workload* says what is generated and what is waited for. Each
arm runs as a separate job through verl's entry point, with the same external probes. The arms take turns
(A B C A B C), and only ratios within one turn are compared. Pure functions reduce the output of a job:

    workload.py   amount of generation, latencies     arms.py     trainers, devices, overrides
    waits.py      seeded latencies                    spans.py    intervals that the probes write
    measure.py    figures of one job from its spans   bound.py    lower bound of the step time
    statistics.py medians and paired ratios           report.py   the table and the JSON
    usage.py      CPU and memory of a process tree    picture.py  the PNG
    runner.py     runs jobs in turns with progress    outputs.py  checks of the output files

The measurements of single parts are arena.py, learning.py, weight_sync.py with stalls.py, and
control_plane.py with loop_lag.py and spread_reward.py. The command line is `lab/cli/bench.py`.
"""
