# SPDX-License-Identifier: Apache-2.0
"""Export metrics to Ray's, which its dashboard, Prometheus and Grafana read, and spans to RL-Insight."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Gauge
from verl.utils.tracking import RLInsightLogger

from ....core.events import LogRecord

PREFIX = "async_pipeline/"
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


def gauge_name(metric: str) -> str:
    """Return the name of a metric's gauge, to which Ray adds the prefix `ray_`."""
    return _NOT_IN_A_NAME.sub("_", metric)


def _in_ascii(text: str) -> str:
    """Return a text that Ray accepts as a tag or a description."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


class RayGauges:
    """One gauge per metric, created on first use; all have the tag `run`."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": _in_ascii(run)}
        self._gauges: dict[str, Gauge] = {}

    def show(self, metrics: Mapping[str, object]) -> None:
        """Set the gauges of the pipeline's numeric metrics; other metrics are left to verl's trackers."""
        for metric, value in metrics.items():
            if not metric.startswith(PREFIX) or not isinstance(value, int | float):
                continue
            if metric not in self._gauges:
                self._gauges[metric] = Gauge(
                    gauge_name(metric), description=_in_ascii(metric), tag_keys=("run",)
                )
            self._gauges[metric].set(float(value), tags=self._tags)


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
