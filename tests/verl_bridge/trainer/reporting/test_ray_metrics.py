# SPDX-License-Identifier: Apache-2.0
"""The pipeline's numeric metrics become gauges of Ray; other metrics do not."""

from __future__ import annotations

from typing import Any

import pytest

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
