# SPDX-License-Identifier: Apache-2.0
"""The pipeline's numeric metrics become gauges of Ray; other metrics do not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from recipe.async_pipeline.core.events import LogRecord
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


def test_gauges_of_numbers_are_set_and_created_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("recipe.async_pipeline.verl_bridge.trainer.reporting.ray_metrics")
    made: list[str] = []
    seen: list[tuple[str, float, dict[str, str]]] = []

    class Recorded(module.Gauge):  # type: ignore[misc, name-defined]
        def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(name, *args, **kwargs)  # Ray checks the name
            made.append(name)

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            super().set(value, tags=tags)
            seen.append((made[-1], value, dict(tags or {})))

    monkeypatch.setattr(module, "Gauge", Recorded)
    gauges = module.RayGauges("smoke")
    gauges.show({"async_pipeline/lag/mean": 1.5, "critic/score/mean": 2.0, "async_pipeline/x": "no number"})
    gauges.show({"async_pipeline/lag/mean": 2})
    assert made == ["async_pipeline_lag_mean"]
    assert seen == [("async_pipeline_lag_mean", v, {"run": "smoke"}) for v in (1.5, 2.0)]


def test_names_of_runs_and_data_need_not_be_ascii(load: Load) -> None:
    module = load("recipe.async_pipeline.verl_bridge.trainer.reporting.ray_metrics")
    module.RayGauges("läuft").show({"async_pipeline/source/実験/reward": 1.0})


def test_names_are_valid_in_prometheus(load: Load) -> None:
    module = load("recipe.async_pipeline.verl_bridge.trainer.reporting.ray_metrics")
    assert (
        module.gauge_name("async_pipeline/idle/my-pool/wait_generate_s")
        == "async_pipeline_idle_my_pool_wait_generate_s"
    )


def record(event: str, state: str | None, **fields: Any) -> LogRecord:
    return LogRecord(t=0.0, role="train", event=event, state=state, fields=fields)


def test_each_state_of_a_lane_is_one_span(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("recipe.async_pipeline.verl_bridge.trainer.reporting.ray_metrics")
    spans: list[tuple[str, int, int, dict[str, Any]]] = []

    class Tracker:
        @staticmethod
        def enabled() -> bool:
            return True

        @staticmethod
        def trace_span(
            name: str, *, start_time_ns: int, end_time_ns: int, attributes: dict[str, Any]
        ) -> None:
            spans.append((name, start_time_ns, end_time_ns, attributes))

    monkeypatch.setattr(module, "RLInsightLogger", Tracker)
    clock = count(1)

    def submit(function: Callable[..., None], *args: Any) -> None:
        function(*args)

    states = module.InsightStates(submit, lambda: next(clock))
    for event, state in (
        ("START", "WAITING_INPUT"),
        ("ITEM", "WAITING_RESOURCE"),
        ("LEASE", "RUNNING"),
        ("TRAINED", "RUNNING"),
        ("FINISH", "WAITING_INPUT"),
    ):
        states(record(event, state, step=3))
    states(record("LEASE", "RUNNING", step=3, lane=1))
    states(LogRecord(t=0.0, role="flow", event="DONE", state="DONE", fields={}))
    facts = {"role": "train", "lane": 0, "step": 3}
    assert spans == [
        ("train: waits for input", 1, 2, facts),
        ("train: waits for devices", 2, 3, facts),
        ("train: runs", 3, 4, facts),
    ]
    assert module.is_enabled()
