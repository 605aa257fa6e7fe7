# SPDX-License-Identifier: Apache-2.0
"""The probe wraps methods that verl's classes have, and writes the same spans as the other probes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.lab.bench.measuring import spans
from recipe.async_pipeline.lab.bench.measuring.spans import SPANS_DIR, read_spans

pytestmark = pytest.mark.real_engine


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    spans.of_this_job.cache_clear()
    monkeypatch.setenv(SPANS_DIR, str(tmp_path))
    return tmp_path


def test_stages_have_spans_and_lags(module: ModuleType, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = module.StockTrainer
    for name in ("_fit_compute_log_prob", "_fit_compute_advantage", "_fit_update_actor"):
        assert callable(getattr(stock, name)), "verl has this method"
        monkeypatch.setattr(stock, name, lambda self, batch: batch)

    async def update_weights(self: Any) -> str:
        return "updated"

    assert asyncio.iscoroutinefunction(stock._fit_update_weights)
    monkeypatch.setattr(stock, "_fit_update_weights", update_weights)
    trainer = object.__new__(module.ProbedFullyAsyncTrainer)
    trainer.current_param_version, trainer.global_steps = 5, 6
    batch = SimpleNamespace(non_tensor_batch={"min_global_steps": [5, 3]})
    assert (
        trainer._fit_update_actor(trainer._fit_compute_advantage(trainer._fit_compute_log_prob(batch)))
        is batch
    )
    assert asyncio.run(trainer._fit_update_weights()) == "updated"
    found = {span.name: span.facts for span in read_spans(job)}
    assert found["update_actor"] == {"step": 6, "samples": 2, "lags": [0, 2]}
    assert set(found) == {"old_log_prob", "advantage", "update_actor", "sync", "weights", "paused"}


def test_the_runner_starts_the_probed_trainer(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(module.stock, "FullyAsyncTrainer", module.stock.FullyAsyncTrainer)
    monkeypatch.setattr(
        module.StockRunner, "run", lambda self, config: started.append(module.stock.FullyAsyncTrainer)
    )
    module.ProbedFullyAsyncRunner().run({})
    (cls,) = started
    assert issubclass(cls.__ray_metadata__.modified_class, module.ProbedFullyAsyncTrainer)
