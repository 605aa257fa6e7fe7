# SPDX-License-Identifier: Apache-2.0
"""How a change would move the bound of a step: the one simple model behind every prediction of the report.

A step cannot take less than any pool's work spread over its devices, nor less than the loop (longest answer,
log-probs,
optimizer step, weights) divided by the batches that may be under way. The larger is the bound. A change of
devices, of
max_lag or of work changes the bound; the run is assumed to stay as far above it as it was. Work is assumed to
spread over
devices evenly, and the loop not to get shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .accounting import Accounting
from .report_data import RunData

FORWARD = ("logp", "ref_logp", "values")
"""Roles that a batch passes through before it is trained."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to change."""

    rule: str
    finding: str
    """What was measured, with its number."""
    change: str
    """What to do about it."""
    gain: float | None = None
    """Predicted: so much more samples a second, as a share; None: it is not about speed, or nobody knows."""
    at_most: bool = False
    """The gain is a bound, not an expectation."""

    @property
    def predicted(self) -> str:
        if self.gain is None:
            return ""
        return f"predicted {'at most ' if self.at_most else ''}{self.gain:+.0%} samples/s"

    def __str__(self) -> str:
        return f"{self.finding}: {self.change}" + (f", {self.predicted}" if self.gain is not None else "")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The bound of a step, in seconds of all steps but the first."""

    work: Mapping[str, float]
    """Device-seconds of work of each pool."""
    devices: Mapping[str, int]
    loop_s: float
    """At `max_lag`."""
    max_lag: int

    @classmethod
    def of(cls, found: Accounting, max_lag: int) -> Model:
        """The account's loop leaves out the forward passes; those of one pool come one after the other."""
        forward = [
            sum(pool.seconds.get(f"compute_{role}", 0.0) for role in FORWARD) / pool.devices
            for pool in found.pools.values()
            if pool.devices
        ]
        return cls(
            work={name: pool.busy for name, pool in found.pools.items() if pool.devices},
            devices={name: pool.devices for name, pool in found.pools.items() if pool.devices},
            # No bound is longer than what was measured.
            loop_s=min(found.steady_s, found.loop_s + max(forward, default=0.0) / (max_lag + 1))
            if found.loop_s
            else 0.0,
            max_lag=max_lag,
        )

    def bound(
        self,
        *,
        devices: Mapping[str, int] | None = None,
        work: Mapping[str, float] | None = None,
        max_lag: int | None = None,
        loop: bool = True,
    ) -> float:
        """With other devices, work or lag than the run had; without the loop, of the pools alone."""
        devices, work = {**self.devices, **(devices or {})}, {**self.work, **(work or {})}
        looped = self.loop_s * (self.max_lag + 1) / ((self.max_lag if max_lag is None else max_lag) + 1)
        return max([work[pool] / devices[pool] for pool in work] + ([looped] if loop else [0.0]))

    def gain(self, changed: float) -> float:
        """Samples a second, as a share more, if the bound becomes `changed`."""
        return self.bound() / changed - 1 if changed else 0.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at."""

    run: RunData
    found: Accounting
    """Without the first step, which is no sample of what others are like."""
    model: Model
    trainer: Mapping[str, float]
    """What the trainer did with the steps' time, as shares: `train`, or the role that it waited for."""

    @property
    def most_awaited(self) -> tuple[str, float]:
        """Role, share; of the roles that the trainer waited for."""
        others = {role: share for role, share in self.trainer.items() if role != "train"}
        return max(others.items(), key=lambda item: item[1], default=("", 0.0))

    def share(self, pool: str, *reasons: str) -> float:
        """Of the pool's device-seconds since the first step."""
        account = self.found.pools[pool]
        passed = account.devices * self.found.steady_s
        return sum(account.seconds.get(reason, 0.0) for reason in reasons) / passed if passed else 0.0

    def busy(self, pool: str) -> float:
        """Share of its time since the first step in which the pool worked."""
        account = self.found.pools[pool]
        return (
            account.busy / (account.devices * self.found.steady_s)
            if self.found.steady_s and account.devices
            else 0.0
        )


def facts_of(run: RunData) -> Facts | None:
    """None: the run has no account, or no step since the first version was served."""
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
