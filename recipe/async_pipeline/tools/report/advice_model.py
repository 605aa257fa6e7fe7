# SPDX-License-Identifier: Apache-2.0
"""Predict how a change would move the lower bound of a step: the model behind every prediction of the report.

The bound is that of `core.lag.bound`; forward passes are in the loop, since they begin with a whole batch.
A change of devices, max_lag or work changes the bound; the model assumes that the run stays as far above it
as it was, that work spreads evenly over devices, and that the loop does not get shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...core.lag.bound import LoopCosts, loop_terms
from ...observe.account.accounting import Accounting
from .figures.data import RunData


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to change."""

    rule: str
    finding: str
    """The measurement, with its number."""
    change: str
    """The change to make."""
    gain: float | None = None
    """Predicted relative increase of samples per second; None if unknown or not about speed."""
    at_most: bool = False
    """Whether the gain is an upper bound instead of an expectation."""

    @property
    def predicted(self) -> str:
        """The predicted gain as text, or an empty string if it is unknown."""
        if self.gain is None:
            return ""
        return f"predicted {'at most ' if self.at_most else ''}{self.gain:+.0%} samples/s"

    def __str__(self) -> str:
        return f"{self.finding}: {self.change}" + (f", {self.predicted}" if self.gain is not None else "")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The lower bound of the step time, as the sum over all steps but the first, in seconds."""

    work: Mapping[str, float]
    """Device-seconds of work by pool."""
    devices: Mapping[str, int]
    loop: LoopCosts
    max_lag: int

    @classmethod
    def of(cls, found: Accounting, max_lag: int) -> Model:
        """Build the model from an account; the loop is left out if the longest responses are not known."""
        loop = replace(found.loop, forward_s=found.forward_s) if found.loop_s else LoopCosts()
        # A lower bound cannot exceed the measured time.
        loop_s = _loop_s(loop, max_lag)
        if loop_s > found.steady_s:
            loop *= found.steady_s / loop_s

        return cls(
            work={name: pool.busy for name, pool in found.pools.items() if pool.devices},
            devices={name: pool.devices for name, pool in found.pools.items() if pool.devices},
            loop=loop,
            max_lag=max_lag,
        )

    def loop_s(self, max_lag: int | None = None) -> float:
        """Return the bound set by the loop, by default at the run's lag."""
        return _loop_s(self.loop, self.max_lag if max_lag is None else max_lag)

    def bound(
        self,
        *,
        devices: Mapping[str, int] | None = None,
        work: Mapping[str, float] | None = None,
        max_lag: int | None = None,
        loop: bool = True,
    ) -> float:
        """Return the bound with changed devices, work or lag; `loop=False` leaves the loop out."""
        devices, work = {**self.devices, **(devices or {})}, {**self.work, **(work or {})}
        return max([work[pool] / devices[pool] for pool in work] + [self.loop_s(max_lag) if loop else 0.0])

    def gain(self, changed: float) -> float:
        """Return the relative increase of samples per second if the bound becomes `changed`."""
        return self.bound() / changed - 1 if changed else 0.0


def _loop_s(costs: LoopCosts, max_lag: int) -> float:
    return loop_terms(costs, max_lag=max_lag, batches_ahead=max_lag, forward=True)["loop"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The input of the rules."""

    run: RunData
    found: Accounting
    """The account without the first step, which is not typical."""
    model: Model
    trainer: Mapping[str, float]
    """Shares of the steps' time: training for `train`, waiting for the stage for every other."""

    @property
    def most_awaited(self) -> tuple[str, float]:
        """The stage that the trainer waited for longest, and its share of the time."""
        others = {role: share for role, share in self.trainer.items() if role != "train"}
        return max(others.items(), key=lambda item: item[1], default=("", 0.0))

    def share(self, pool: str, *reasons: str) -> float:
        """Return the share of these reasons in the pool's device-seconds since the first step."""
        account = self.found.pools[pool]
        passed = account.devices * self.found.steady_s
        return sum(account.seconds.get(reason, 0.0) for reason in reasons) / passed if passed else 0.0

    def busy(self, pool: str) -> float:
        """Return the share of work in the pool's device-seconds since the first step."""
        account = self.found.pools[pool]
        passed = account.devices * self.found.steady_s
        return account.busy / passed if passed else 0.0


def facts_of(run: RunData) -> Facts | None:
    """Return the facts of a run, or None if it has no account or no step since the first version."""
    found = run.typical
    if found is None or not found.steps or not found.steady_s:
        return None

    seconds: dict[str, float] = {}
    for step in found.steps:
        for role, spent in step.seconds.items():
            seconds[role] = seconds.get(role, 0.0) + spent

    total = sum(seconds.values())
    trainer = {role: spent / total for role, spent in seconds.items()} if total else {}
    return Facts(run=run, found=found, model=Model.of(found, run.max_lag or 0), trainer=trainer)
