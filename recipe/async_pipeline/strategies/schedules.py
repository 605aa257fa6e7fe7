# SPDX-License-Identifier: Apache-2.0
"""The schedules of the four strategies."""

from __future__ import annotations

from typing import ClassVar

from ..core.groups.untrained_groups import Order
from ..core.schedule import Schedule


class OnPolicy(Schedule):
    """Generate batch s+1 by the weights of step s: lag 0.

    Trains the same batches as verl's sync trainer; only scoring overlaps generation.
    """

    implied_lag: ClassVar[int | None] = 0


class OneStepOff(Schedule):
    """Generate one batch while the one before trains: lag at most 1, and 0 for the first batch.

    Source: Noukhovitch et al., "Asynchronous RLHF", arXiv 2410.18252.
    """

    implied_lag: ClassVar[int | None] = 1


class NStepAhead(Schedule):
    """Generate n later batches while the longest response of a batch is awaited: lag at most n = max_lag.

    More than ceil(longest response / step time) batches ahead only add staleness.
    """


class FullyAsync(Schedule):
    """Train groups in the order in which they finish: lag at most max_lag.

    No batch waits for its longest response; a step waits only for one that would get too old. In the terms of
    rLLM's fully asynchronous trainer: its rollout executor is the stage `generate`, its message queue
    `core.groups.message_queue`, its trainer `train` and its parameter sync `param_update`.
    """

    order: ClassVar[Order] = "finished"
