# SPDX-License-Identifier: Apache-2.0
"""Where every device-second went, from the event log alone.

Each second of each device of each pool has exactly one reason:

    compute_<role>    a role holds the pool and computes
    sync              weights are gathered, or a replica stands still to load them
    validation        a version is validated on the rollout's devices
    wait_environment  answers are open, and all of them are with an agent loop, a tool or a reward function
    lease_<role>      a role holds the pool and waits for room to hand on what it made
    wait_<role>       nobody holds the pool, and this is the nearest role, going back from those that live on
    it,
                      that is at work: whom the pool waits for
    start_up          until the first version is served
    none              nobody anywhere is at work: the run is ending

What happened inside the rollout's servers is known when they next load a version: how long they had requests
open,
how long they stood still. Until then their pool's seconds are pending, and count as the roles saw them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Seconds = defaultdict[str, float]
"""Device-seconds by reason."""

_WORK = ("compute_", "sync", "validation")
_TOLERANCE = 1e-6
"""Of the sums, relative: they are made of floats."""


def is_work(reason: str) -> bool:
    """Is a device-second of this reason one of work: what roles compute, weights, validation?"""
    return reason.startswith(_WORK)


class AccountingError(AssertionError):
    """Device-seconds do not add up; the event log or this module is wrong."""


@dataclass(kw_only=True)
class PoolAccount:
    """The device-seconds of one pool."""

    devices: int
    roles: tuple[str, ...]
    seconds: Seconds = field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def busy(self) -> float:
        """Device-seconds of work."""
        return sum(s for reason, s in self.seconds.items() if is_work(reason))

    def shares(self) -> dict[str, float]:
        """Share of each reason, largest first; they sum to 1 if any time has passed."""
        total = self.total
        ranked = sorted(self.seconds.items(), key=lambda item: -item[1])
        return {reason: s / total for reason, s in ranked if s > 0} if total else {}


@dataclass(frozen=True, kw_only=True)
class StepAccount:
    """What the trainer's role did between the end of the step before and the end of this one."""

    step: int
    seconds: Mapping[str, float]
    """By role: seconds in which the trainer waited for it, or for `train`, trained."""

    @property
    def critical(self) -> str:
        """The role that took most of the step."""
        return max(self.seconds, key=lambda role: self.seconds[role])


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """A run, or a part of one."""

    wall_s: float
    """With start-up."""
    pools: Mapping[str, PoolAccount]
    steps: Sequence[StepAccount]
    steady_s: float
    """Without start-up: seconds since the first version was served."""
    loop_s: float = 0.0
    """Of `steady_s`, what the steps would have taken had each only waited its turn for its longest answer;
    see `overlap_efficiency`.
    """

    def check(self) -> None:
        """Raises AccountingError: a pool's seconds are not its devices times the wall clock."""
        for name, pool in self.pools.items():
            expected = pool.devices * self.wall_s
            if abs(pool.total - expected) > _TOLERANCE * max(1.0, expected):
                raise AccountingError(
                    f"pool {name}: {pool.total:.6f} device-seconds are accounted for, {expected:.6f} have "
                    "passed"
                )

    def after(self, earlier: Accounting, loop_s: float) -> Accounting:
        """What came on top of an earlier account of the same run; `loop_s` of that part."""
        pools = {
            name: PoolAccount(
                devices=p.devices,
                roles=p.roles,
                seconds=sum_by_reason(p.seconds, _negative(earlier.pools[name].seconds)),
            )
            for name, p in self.pools.items()
        }
        wall_s = self.wall_s - earlier.wall_s
        result = Accounting(
            wall_s=wall_s, pools=pools, steps=self.steps[len(earlier.steps) :], steady_s=wall_s, loop_s=loop_s
        )
        result.check()
        return result

    @property
    def bubble_ratio(self) -> float:
        """Share of all device-seconds since the first version was served in which a device did no work."""
        passed = self.steady_s * sum(pool.devices for pool in self.pools.values())
        return max(0.0, 1 - sum(pool.busy for pool in self.pools.values()) / passed) if passed else 0.0

    @property
    def busiest(self) -> float:
        """Share of that time in which the busiest pool worked: 1 if no schedule could be faster on these
        pools.
        """
        busy = [pool.busy / pool.devices for pool in self.pools.values() if pool.devices]
        return min(1.0, max(busy, default=0.0) / self.steady_s) if self.steady_s else 0.0

    @property
    def overlap_efficiency(self) -> float:
        """How close the steps were to the fastest that any schedule could make of the same work on these
        pools.

        Two bounds, of which the larger counts. A pool cannot do its work in less time than it takes. And of
        the loop
        prompt, longest answer, optimizer step, weights only max_lag + 1 batches can be under way at a time.
        """
        return min(1.0, max(self.busiest, self.loop_s / self.steady_s)) if self.steady_s else 0.0


def sum_by_reason(*parts: Mapping[str, float]) -> Seconds:
    total: Seconds = defaultdict(float)
    for part in parts:
        for reason, seconds in part.items():
            total[reason] += seconds
    return total


def _negative(seconds: Mapping[str, float]) -> Mapping[str, float]:
    return {reason: -s for reason, s in seconds.items()}
