# SPDX-License-Identifier: Apache-2.0
"""A series has the steps in which a metric is a number."""

from __future__ import annotations

from types import SimpleNamespace

from recipe.async_pipeline.tools.report.series import Series, series_of


def test_steps_without_the_metric_are_left_out() -> None:
    rows = [
        SimpleNamespace(step=n, data=data) for n, data in enumerate([{"a": 1}, {}, {"a": "x"}, {"a": 2.5}])
    ]
    assert series_of(rows, "a") == Series(x=[0.0, 3.0], y=[1.0, 2.5])
    assert not series_of(rows, "b") and series_of(rows, "a")
