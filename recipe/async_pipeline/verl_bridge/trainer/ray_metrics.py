# SPDX-License-Identifier: Apache-2.0
"""Our metrics in Ray's own metrics, which its dashboard, Prometheus and Grafana read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ray.util.metrics import Gauge

PREFIX = "async_pipeline/"
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


def gauge_name(metric: str) -> str:
    """Ray puts `ray_` before it."""
    return _NOT_IN_A_NAME.sub("_", metric)


class RayGauges:
    """One gauge a metric, made when it is first seen; all have the tag `run`."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._gauges: dict[str, Gauge] = {}

    def show(self, metrics: Mapping[str, object]) -> None:
        """Set the gauges of our own numbers; those of verl are left to its trackers."""
        for metric, value in metrics.items():
            if not metric.startswith(PREFIX) or not isinstance(value, int | float):
                continue
            if metric not in self._gauges:
                self._gauges[metric] = Gauge(gauge_name(metric), description=metric, tag_keys=("run",))
            self._gauges[metric].set(float(value), tags=self._tags)
