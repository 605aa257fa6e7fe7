# SPDX-License-Identifier: Apache-2.0
"""The law of the step time: how long a step must take at a lag, for plan, bench and report.

    pools    the devices of a pool do their own work of a step, one stage after another
    loop     a batch that is admitted when version v is served is trained by step v + max_lag + 1; until then
             its slowest response is written, and the optimizer step and the weight update follow
    littles  batches in flight = rate x time in flight, on average (Little's law)

The planner takes the costs from a profile, the benchmarks from the spans of their probes, and the account of
a run from its event log. All three pass them here, so that their bounds agree. Each term is a lower bound of
the mean step time over all schedules of the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class LoopCosts:
    """What a batch passes through from its admission until its weights are served, in seconds.

    Of one step, or summed over several.
    """

    tail_s: float = 0.0
    """From the first request of the batch to its last score."""
    group_s: float = 0.0
    """The same for an average group of the batch, or 0 if it is not known."""
    forward_s: float = 0.0
    """Log-probs, values and advantages. They can precede the last response: no part of a bound."""
    update_s: float = 0.0
    """The optimizer step."""
    weights_s: float = 0.0
    """The weight update, until all replicas serve the version."""

    def __add__(self, other: LoopCosts) -> LoopCosts:
        return LoopCosts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> LoopCosts:
        return LoopCosts(*(value * factor for value in astuple(self)))


def loop_terms(
    costs: LoopCosts, *, max_lag: int | None, batches_ahead: int, forward: bool = False
) -> dict[str, float]:
    """Return the seconds per step that the loop takes.

    `max_lag` is None if the lag has no bound: fast responses then overtake slow ones, and only Little's law
    remains. `batches_ahead`: batches that are generated besides the one that is trained. `forward` adds the
    forward passes: an estimate for stages that begin with a whole batch, not a bound.
    """
    after_s = costs.update_s + costs.weights_s + (costs.forward_s if forward else 0.0)
    terms = {} if max_lag is None else {"loop": (costs.tail_s + after_s) / (max_lag + 1)}
    return {**terms, "littles": (costs.group_s + after_s) / (batches_ahead + 1)}


def bound_terms(
    pools: Mapping[str, float], costs: LoopCosts, *, max_lag: int | None, batches_ahead: int
) -> dict[str, float]:
    """Return the seconds per step of each constraint; no schedule is faster than the largest.

    `pools`: the seconds per step in which each pool does its work.
    """
    return {**pools, **loop_terms(costs, max_lag=max_lag, batches_ahead=batches_ahead)}
