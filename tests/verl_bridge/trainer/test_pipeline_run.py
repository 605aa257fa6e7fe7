# SPDX-License-Identifier: Apache-2.0
"""A run starts although one of its trackers cannot be opened."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.observe.observers import Observers

pytestmark = pytest.mark.real_engine


def test_a_tracker_that_cannot_be_opened_ends_no_start(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said, logged = list[str](), list[Any]()

    def tracking(*, default_backend: str, project_name: str, **_: Any) -> Any:
        if default_backend == "bad":
            raise ConnectionError("503")
        log = lambda *, data, step: logged.append((default_backend, project_name, data))  # noqa: E731
        return SimpleNamespace(logger={default_backend: None}, log=log, finish=lambda: None)

    monkeypatch.setattr(module, "Tracking", tracking)
    monkeypatch.setattr(module, "speed_settings", lambda *of: {})
    for part in ("generation", "report", "checkpointing", "elasticity"):
        monkeypatch.setattr(module.PipelineRun, f"_new_{part}", lambda *of: None)
    trainer = {"project_name": "p", "experiment_name": "e", "logger": ["bad", "file"]}
    run = object.__new__(module.PipelineRun)
    vars(run).update(
        verl=SimpleNamespace(),
        resumed=None,
        _restored=None,
        observers=Observers(said.append),
        knobs=SimpleNamespace(strategy="one_step_off"),
        runtime=SimpleNamespace(run_dir=tmp_path, run="r", started_unix=0.0),
        schedule=SimpleNamespace(max_lag=1),
        config=OmegaConf.create({"trainer": trainer}),
    )
    run.open(None)
    run.trackers.log_metrics({"a": 1}, 1)
    assert logged == [("file", "p", {"a": 1})]
    assert run.verl.validation_generations_logger is run.trackers
    assert said[0].startswith("the tracker bad fails: ConnectionError: 503; it is tried again")
    run.folder.ledger.close()
