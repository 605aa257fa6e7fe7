# SPDX-License-Identifier: Apache-2.0
"""The probe finds what it wraps in verl's own classes, and writes what the others write."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.bench import spans
from recipe.async_pipeline.bench.spans import SPANS_DIR, read_spans
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def ours(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.bench.fully_async")


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    spans.of_this_job.cache_clear()
    monkeypatch.setenv(SPANS_DIR, str(tmp_path))
    return tmp_path


def test_stages_are_timed_and_lags_are_noted(
    ours: ModuleType, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock: Any = ours._Trainer
    for name in ("_fit_compute_log_prob", "_fit_compute_advantage", "_fit_update_actor"):
        assert callable(getattr(stock, name)), "verl has it"
        monkeypatch.setattr(stock, name, lambda self, batch: batch)

    async def update_weights(self: Any) -> str:
        return "updated"

    assert asyncio.iscoroutinefunction(stock._fit_update_weights)
    monkeypatch.setattr(stock, "_fit_update_weights", update_weights)
    trainer = object.__new__(ours.ProbedFullyAsyncTrainer)
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


def test_the_runner_starts_the_trainer_that_is_timed(
    ours: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(ours.stock, "FullyAsyncTrainer", ours.stock.FullyAsyncTrainer)
    monkeypatch.setattr(
        ours._Runner, "run", lambda self, config: started.append(ours.stock.FullyAsyncTrainer)
    )
    object.__new__(ours.ProbedFullyAsyncRunner).run({})
    (cls,) = started
    assert issubclass(cls.__ray_metadata__.modified_class, ours.ProbedFullyAsyncTrainer)
