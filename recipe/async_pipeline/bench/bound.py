# SPDX-License-Identifier: Apache-2.0
"""The best step time that any schedule of the same work could reach.

Two kinds of bound, as for any pipeline: a resource cannot do its work of a step in less than that work
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
    sync_s: float
    """Weights from the trainer to the engine."""
    generate_cpu_s: float
    """CPU time of the engines: on a CPU, a device is a thread."""
    cpu_s: float
    """CPU time of all processes."""


def bound_step_s(
    work: StageWork, *, batches_in_flight: int, bounded_lag: bool, shared_devices: bool, cores: int, devices: int
) -> float:
    """Seconds a step, no less than which any schedule takes.

    With a bounded lag, `batches_in_flight` is that lag + 1, and the slowest answer of each batch must be there
    in time. Without, fast answers overtake slow ones, and only the average counts (Little's law). With shared
    devices, all of them train and all generate, in turn; otherwise one trains while one generates.
    """
    latency = work.tail_s if bounded_lag else work.group_s
    loop = (latency + work.train_s + work.sync_s) / batches_in_flight
    device = (
        work.train_s + work.generate_cpu_s / devices
        if shared_devices
        else max(work.train_s, work.generate_cpu_s)
    )
    return max(loop, device, work.cpu_s / cores)
