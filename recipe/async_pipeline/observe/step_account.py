# SPDX-License-Identifier: Apache-2.0
"""The account of a run as metrics of each step, and as a part of the summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.events import LogRecord
from .accountant import Accountant
from .accounting import Accounting, is_work


class StepAccountant:
    """A subscriber of the event log that is asked once a step.

    The rollout's pool is accounted for up to its last load of a version, so what a step is told of it may
    have
    happened a step earlier; over a run it adds up all the same.
    """

    def __init__(self) -> None:
        self._accountant = Accountant()
        self._before: Mapping[str, Mapping[str, float]] = {}

    def __call__(self, record: LogRecord) -> None:
        self._accountant(record)

    def take(self) -> dict[str, float]:
        """Metrics of the time since this was last asked, device-seconds if not shares.

        `overlap_efficiency` is that of the run so far.
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
        """The role that took most of the last step; empty before the first."""
        steps = self._accountant.account().steps
        return steps[-1].critical if steps else ""

    def summary(self) -> dict[str, Any]:
        """For `summary.json`. Raises AccountingError: device-seconds do not add up."""
        return summary_of(self._accountant.account())


def summary_of(account: Accounting) -> dict[str, Any]:
    """Shares of each pool's device-seconds, and what they come down to."""
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
