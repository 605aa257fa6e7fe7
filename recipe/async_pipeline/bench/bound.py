# SPDX-License-Identifier: Apache-2.0
"""The best step time that a schedule of the same work could reach.

Two kinds of constraint, as for any pipeline: a resource cannot do its work of a step in less than that work
takes, and the loop prompt -> answers -> optimizer step -> weights -> next prompt has only so many batches
in it at a time.
"""

from __future__ import annotations

from typing import NamedTuple


class StageWork(NamedTuple):
    """What one step costs, in seconds, measured where it was least disturbed."""

    tail_s: float
    """From a batch's first prompt to its last reward."""
    group_s: float
    """From a prompt's first request to its last reward, on average."""
    train_s: float
    """Log-probs, advantages and optimizer step, on the training devices."""
    update_s: float
    """The optimizer step alone. All else could be done before the last answer is there."""
    weights_s: float
    """Weights from the trainer to the engines."""
    generate_cpu_s: float
    """CPU time of the engines: on a CPU, a device is a thread."""
    cpu_s: float
    """CPU time of all processes: what these processes need, not what the work needs."""


def bound_terms(
    work: StageWork,
    *,
    batches_in_flight: int,
    bounded_lag: bool,
    shared_devices: bool,
    cores: int,
    devices: int,
) -> dict[str, float]:
    """Seconds a step that each constraint takes; no schedule is faster than the largest.

    `loop`: with a bounded lag, `batches_in_flight` is that lag + 1, and the slowest answer of each batch must
    be
    there in time. Without, fast answers overtake slow ones, and only the average counts (Little's law).
    `devices`: one trains while one generates; shared ones do both in turn. `cores`: all processes together.
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
