# SPDX-License-Identifier: Apache-2.0
"""Export the pipeline's metrics to Ray's metrics, which its dashboard, Prometheus and Grafana read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ray.util.metrics import Gauge

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
