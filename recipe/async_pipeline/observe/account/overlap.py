# SPDX-License-Identifier: Apache-2.0
"""Measure during a run how long two stages compute at the same time."""

from __future__ import annotations

from ...core.events import LogRecord
from ...core.replay import RunState

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
