# SPDX-License-Identifier: Apache-2.0
"""Report the activity of each stage as spans of RL-Insight, if verl uses that tracker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from verl.utils.tracking import RLInsightLogger

from ....core.events import LogRecord

_SHOWN = {
    "WAITING_INPUT": "waits for input",
    "WAITING_RESOURCE": "waits for devices",
    "RUNNING": "runs",
    "WAITING_OUTPUT": "hands over",
}


class InsightStates:
    """A subscriber of the event log that reports spans in another thread, to keep the event loop free."""

    def __init__(self, submit: Callable[..., Any], now_ns: Callable[[], int] = time.time_ns) -> None:
        """`submit` calls a function with its arguments in another thread."""
        self._submit, self._now_ns = submit, now_ns
        self._since: dict[tuple[str, int], tuple[str, int]] = {}

    def __call__(self, record: LogRecord) -> None:
        if record.state is None or record.role == "flow":
            return
        lane = (record.role, int(record.fields.get("lane", 0)))
        state, since = self._since.get(lane, (record.state, 0))
        if state == record.state and since:
            return

        now = self._now_ns()
        self._since[lane] = (record.state, now)
        if since and state in _SHOWN:
            self._submit(
                _report,
                f"{record.role}: {_SHOWN[state]}",
                since,
                now,
                {"role": record.role, "lane": lane[1], "step": record.fields.get("step", "")},
            )


def _report(name: str, since_ns: int, now_ns: int, attributes: dict[str, Any]) -> None:
    RLInsightLogger.trace_span(name, start_time_ns=since_ns, end_time_ns=now_ns, attributes=attributes)


def is_enabled() -> bool:
    """Return whether the user has chosen this tracker."""
    return bool(RLInsightLogger.enabled())
