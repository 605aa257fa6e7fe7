# SPDX-License-Identifier: Apache-2.0
"""Compute the lower bound of the step time over all schedules of the same work.

A pipeline has two kinds of constraints: each resource must do its work of a step, and the loop prompt ->
responses -> optimizer step -> weights -> next prompt holds a limited number of batches at a time.
"""

from __future__ import annotations

from typing import NamedTuple


class StageWork(NamedTuple):
    """Seconds of work and latency of one step, from the least disturbed measurements."""

    tail_s: float
    """Time from the first prompt of a batch to its last reward."""
    group_s: float
    """Mean time from the first request of a prompt to its last reward."""
    train_s: float
    """Log-probs, advantages and optimizer step on the training devices."""
    update_s: float
    """The optimizer step alone; all other training work can precede the last response."""
    weights_s: float
    """Weight update from the trainer to the engines."""
    generate_cpu_s: float
    """CPU time of the engines; on a CPU, a device is a thread."""
    cpu_s: float
    """CPU time of all processes, including their overhead."""


def bound_terms(
    work: StageWork,
    *,
    batches_in_flight: int,
    bounded_lag: bool,
    shared_devices: bool,
    cores: int,
    devices: int,
) -> dict[str, float]:
    """Return the seconds per step of each constraint; no schedule is faster than the largest.

    `loop`: with a bounded lag, `batches_in_flight` is that lag + 1, and each batch waits for its slowest
    response. Without a bound, fast responses overtake slow ones, and the mean counts (Little's law).
    `devices`: one trains while one generates; shared devices do both in turn. `cores`: all processes.
    """
    latency = work.tail_s if bounded_lag else work.group_s
    return {
        "loop": (latency + work.update_s + work.weights_s) / batches_in_flight,
        "devices": (
            work.train_s + work.generate_cpu_s / devices
            if shared_devices
            else max(work.train_s, work.generate_cpu_s)
        ),
        "cores": work.cpu_s / cores,
    }
