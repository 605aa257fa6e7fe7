# SPDX-License-Identifier: Apache-2.0
"""Measure during a run how long two stages compute at the same time."""

from __future__ import annotations

from ..core.events import LogRecord
from ..core.state_machine import StageState


class OverlapMeter:
    """A subscriber of the event log. A stage computes while any of its lanes is RUNNING."""

    def __init__(self, first: str = "generate", second: str = "train") -> None:
        self.seconds = 0.0
        self._running: dict[str, set[int]] = {first: set(), second: set()}
        self._since: float | None = None

    def __call__(self, record: LogRecord) -> None:
        lanes = self._running.get(record.role)
        if lanes is None or record.state is None:
            return
        lane = int(record.fields.get("lane", 0))
        if record.state == StageState.RUNNING.name:
            lanes.add(lane)
        else:
            lanes.discard(lane)

        both = all(self._running.values())
        if both and self._since is None:
            self._since = record.t
        elif not both and self._since is not None:
            self.seconds += record.t - self._since
            self._since = None
