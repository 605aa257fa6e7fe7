# SPDX-License-Identifier: Apache-2.0
"""A run starts although one of its trackers cannot be opened, and saves when it gets a notice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.core.events import EventLog
from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.core.waits.clock import LoopClock
from recipe.async_pipeline.core.waits.retry import CheckpointTimes
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


@pytest.mark.parametrize(("notice_s", "saves"), [(60.0, True), (0.0, False)])
def test_a_notice_is_for_a_checkpoint_of_the_next_step(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, notice_s: float, saves: bool
) -> None:
    said = list[str]()
    monkeypatch.setattr(module, "say", said.append)
    schedule = Schedule(batch=1, last_step=100, save_every=50)
    flow = SimpleNamespace(
        versions=SimpleNamespace(trained=7, criticised=8),
        checkpoints=CheckpointTimes(schedule),
        log=EventLog(LoopClock()),
    )
    run = object.__new__(module.PipelineRun)
    faults = SimpleNamespace(notice_s=notice_s)
    vars(run).update(_flow=flow, knobs=SimpleNamespace(faults=faults))

    async def train() -> None:
        noticed = asyncio.create_task(run._save_on_notice())
        await asyncio.sleep(0)
        assert [step for step in range(1, 51) if flow.checkpoints.saves(step)] == [9, 50]
        if saves:
            flow.checkpoints.succeeded(9)
            flow.log.append("train", "SAVED", step=9)
        await noticed

    asyncio.run(train())
    assert said[0].startswith("SIGTERM: the run ends once step 9 has a checkpoint")
    none_yet = "step 9 has no checkpoint yet; the last complete one is of step 0"
    assert said[1:] == ([] if saves else [none_yet])
