# SPDX-License-Identifier: Apache-2.0
"""Report the account of a run, as metrics of each step and as a part of the summary; measure overlap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.events import LogRecord
from ...core.replay import RunState
from .accountant import Accountant
from .accounting import Accounting, is_work


class StepAccountant:
    """A subscriber of the event log that reports metrics once per step.

    The rollout's pool is final only up to its last weight update, so some of its seconds may appear one step
    late. The sum over the run is exact.
    """

    def __init__(self) -> None:
        # The steps would grow with the run; `events.jsonl` has them.
        self._accountant = Accountant(keep_steps=1)
        self._before: Mapping[str, Mapping[str, float]] = {}

    def __call__(self, record: LogRecord) -> None:
        self._accountant(record)

    def take(self) -> dict[str, float]:
        """Return metrics of the time since the last call: device-seconds, and shares of them.

        `overlap_efficiency` covers the run so far.
        """
        now, before = self._accountant.settled(), self._before
        self._before = now

        metrics: dict[str, float] = {}
        worked = passed = 0.0
        for pool, seconds in now.items():
            for reason, total in seconds.items():
                if reason == "start_up":
                    continue
                spent = total - before.get(pool, {}).get(reason, 0.0)
                passed += spent
                worked += spent if is_work(reason) else 0.0
                metrics[f"{'busy' if is_work(reason) else 'idle'}/{pool}/{reason}_s"] = spent

        metrics["bubble_ratio"] = max(0.0, 1 - worked / passed) if passed else 0.0
        metrics["overlap_efficiency"] = self._accountant.account().overlap_efficiency
        return metrics

    def critical_role(self) -> str:
        """Return the stage that took most of the last step, or an empty string before the first step."""
        step = self._accountant.last_step
        return step.critical if step is not None else ""

    def summary(self) -> dict[str, Any]:
        """Return the part for `summary.json`. Raises AccountingError if device-seconds do not add up."""
        return summary_of(self._accountant.account())


def summary_of(account: Accounting) -> dict[str, Any]:
    """Return the device-seconds of each pool by reason, and the figures derived from them."""
    return {
        "bubble_ratio": round(account.bubble_ratio, 4),
        "overlap_efficiency": round(account.overlap_efficiency, 4),
        "device_seconds": {
            name: {
                "devices": pool.devices,
                **{reason: round(s, 3) for reason, s in pool.seconds.items() if s > 0},
            }
            for name, pool in account.pools.items()
        },
    }


ROLES = ("generate", "train")


class OverlapMeter:
    """A subscriber of the event log. A stage computes while any of its lanes is RUNNING."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._state = RunState()
        self._since: float | None = None

    def __call__(self, record: LogRecord) -> None:
        if record.role not in ROLES:
            return
        self._state(record)
        both = all(map(self._state.is_running, ROLES))
        if both and self._since is None:
            self._since = record.t
        elif not both and self._since is not None:
            self.seconds += record.t - self._since
            self._since = None
