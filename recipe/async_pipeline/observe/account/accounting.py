# SPDX-License-Identifier: Apache-2.0
"""What an account of device-seconds is: every second of every device of a run, each with one reason.

The reasons, where ROLE is the name of a stage:

    compute_ROLE      a stage holds the pool and computes
    sync              weights are gathered, or a replica pauses to load them
    validation        a version is validated on the rollout's devices
    wait_environment  responses are open, all of them in an agent loop, a tool or a reward function
    lease_ROLE        a stage holds the pool but waits for space in its output channel
    wait_ROLE         the pool is free and waits for this stage: the nearest one at work upstream
    start_up          before the first version is served
    none              no stage is at work: the run is ending
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.lag.bound import LoopCosts, loop_terms

DeviceSeconds = defaultdict[str, float]
"""Device-seconds by reason."""

FORWARD = ("logp", "ref_logp", "values")
"""Stages that a batch passes through on devices before it is trained."""
_WORK = ("compute_", "sync", "validation")
_TOLERANCE = 1e-6
"""Relative tolerance of the sums, for rounding errors."""


def is_work(reason: str) -> bool:
    """Return whether a reason is work: computing, loading weights or validating."""
    return reason.startswith(_WORK)


class AccountingError(AssertionError):
    """Device-seconds do not add up; the event log or this module is wrong."""


@dataclass(kw_only=True)
class PoolAccount:
    """The device-seconds of one pool."""

    devices: int
    """At the end; replicas may have joined or left meanwhile."""
    roles: tuple[str, ...]
    seconds: DeviceSeconds = field(default_factory=lambda: defaultdict(float))
    changes: tuple[tuple[float, int], ...] = ()
    """Each change of the number of devices: seconds since the start of the account, devices added."""

    def present_s(self, start_s: float, end_s: float) -> float:
        """Return the device-seconds between two times since the start of the account."""
        missed = sum(added * (t - start_s) for t, added in self.changes if t > start_s)
        return self.devices * (end_s - start_s) - missed

    @property
    def total(self) -> float:
        """Device-seconds of all reasons."""
        return sum(self.seconds.values())

    @property
    def busy(self) -> float:
        """Device-seconds of work."""
        return sum(s for reason, s in self.seconds.items() if is_work(reason))

    @property
    def forward_s(self) -> float:
        """Seconds of the stages that a batch passes through before it is trained."""
        device_s = sum(self.seconds.get(f"compute_{role}", 0.0) for role in FORWARD)
        return device_s / self.devices if self.devices else 0.0

    def shares(self) -> dict[str, float]:
        """Return the share of each reason, largest first; the shares sum to 1, or are empty at time 0."""
        total = self.total

        ranked = sorted(self.seconds.items(), key=lambda item: -item[1])
        return {reason: s / total for reason, s in ranked if s > 0} if total else {}


@dataclass(frozen=True, kw_only=True)
class StepAccount:
    """How the trainer spent the time between the previous optimizer step and this one."""

    step: int
    seconds: Mapping[str, float]
    """Seconds by stage: training for `train`, waiting for the stage for every other."""

    @property
    def critical(self) -> str:
        """The stage that took most of the step."""
        return max(self.seconds, key=lambda role: self.seconds[role])


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """The account of a run, or of a part of one."""

    wall_s: float
    """Wall-clock seconds, start-up included."""
    pools: Mapping[str, PoolAccount]
    steps: Sequence[StepAccount]
    steady_s: float
    """Wall-clock seconds since the first version was served."""
    max_lag: int = 0
    loop: LoopCosts = LoopCosts()
    """The sum over all steps."""

    def check(self) -> None:
        """Check the sums. Raises AccountingError if a pool's seconds are not its devices times `wall_s`."""
        for name, pool in self.pools.items():
            expected = pool.present_s(0.0, self.wall_s)
            if abs(pool.total - expected) > _TOLERANCE * max(1.0, expected):
                raise AccountingError(
                    f"pool {name}: {pool.total:.6f} of {expected:.6f} device-seconds are accounted for"
                )

    def after(self, earlier: Accounting, loop: LoopCosts) -> Accounting:
        """Return the account of the time since an earlier account of the same run.

        `loop`: the costs of the steps of that part. Raises AccountingError if the difference does not add up.
        """
        pools = {
            name: PoolAccount(
                devices=p.devices,
                roles=p.roles,
                seconds=sum_by_reason(p.seconds, _negative(earlier.pools[name].seconds)),
                changes=tuple((t - earlier.wall_s, n) for t, n in p.changes if t > earlier.wall_s),
            )
            for name, p in self.pools.items()
        }

        wall_s = self.wall_s - earlier.wall_s
        result = Accounting(
            wall_s=wall_s,
            pools=pools,
            steps=self.steps[len(earlier.steps) :],
            steady_s=wall_s,
            max_lag=self.max_lag,
            loop=loop,
        )
        result.check()
        return result

    @property
    def bubble_ratio(self) -> float:
        """Share of device-seconds without work since the first version was served."""
        passed = sum(self._steady_device_s(pool) for pool in self.pools.values())
        return max(0.0, 1 - sum(pool.busy for pool in self.pools.values()) / passed) if passed else 0.0

    @property
    def busiest(self) -> float:
        """Share of that time in which the busiest pool worked; at 1, no schedule is faster on these pools."""
        if not self.steady_s:
            return 0.0
        shares = [pool.busy / s for pool in self.pools.values() if (s := self._steady_device_s(pool)) > 0]
        return min(1.0, max(shares, default=0.0))

    def _steady_device_s(self, pool: PoolAccount) -> float:
        """Return the pool's device-seconds since the first version was served."""
        return pool.present_s(self.wall_s - self.steady_s, self.wall_s)

    @property
    def overlap_efficiency(self) -> float:
        """Fastest possible time for the same work on these pools, divided by the time taken, in [0, 1].

        The larger of two lower bounds counts: the work of the busiest pool, and the loop (`core.lag.bound`).
        """
        return min(1.0, max(self.busiest, self.loop_s / self.steady_s)) if self.steady_s else 0.0

    @property
    def loop_s(self) -> float:
        """Lower bound of `steady_s` set by the loop."""
        return loop_terms(self.loop, max_lag=self.max_lag, batches_ahead=self.max_lag)["loop"]

    @property
    def forward_s(self) -> float:
        """Seconds of the forward passes: of the pool in which they take longest, one after another there."""
        return max((pool.forward_s for pool in self.pools.values()), default=0.0)


def sum_by_reason(*parts: Mapping[str, float]) -> DeviceSeconds:
    """Return the sum of several accounts of device-seconds."""
    total: DeviceSeconds = defaultdict(float)
    for part in parts:
        for reason, seconds in part.items():
            total[reason] += seconds
    return total


def _negative(seconds: Mapping[str, float]) -> Mapping[str, float]:
    return {reason: -s for reason, s in seconds.items()}
