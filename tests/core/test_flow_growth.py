# SPDX-License-Identifier: Apache-2.0
"""Memory of the driver does not grow with the length of a run, with all observers of a real run attached."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core import flow as flow_module
from recipe.async_pipeline.core.groups.items import StepBatch
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.observe.account.accountant import OverlapMeter, StepAccountant
from recipe.async_pipeline.observe.observers import Observers
from recipe.async_pipeline.observe.run_directory.event_file import EventFile
from recipe.async_pipeline.observe.run_directory.summary import RunRecorder
from recipe.async_pipeline.observe.samples.selection_bias import SelectionMeter
from tests.fakes.trainer import SimTrainer

EARLY, LATE = 40, 400
"""Steps after which objects are counted."""
STEPS = LATE + 10
"""The end of a run holds other objects: tasks that are over, and tracebacks of those it has cancelled."""
KEPT = 16
"""Events and weight updates that are kept in memory, so that both limits are reached before EARLY."""
SLACK = 60
"""Objects and entries in flight, which differ by some thirty: fewer than one in six steps."""


CONTAINERS = (list, dict, set, deque, tuple)


class Held(NamedTuple):
    objects: int
    entries: int
    """Of all containers."""


def held(*roots: object) -> Held:
    """Count the objects that the roots refer to, directly or through others, and what these contain."""
    gc.collect()
    shared = (type, ModuleType, FunctionType, BuiltinFunctionType, asyncio.AbstractEventLoop)
    seen: dict[int, object] = {}
    unseen: list[object] = list(roots)
    while unseen:
        new = {id(one): one for one in unseen if id(one) not in seen and not isinstance(one, shared)}
        seen |= new
        unseen = gc.get_referents(*new.values())
    objects = [one for one in seen.values() if not isinstance(one, int | float | str)]
    return Held(len(objects), sum(len(one) for one in objects if isinstance(one, CONTAINERS)))


class ObservedTrainer(SimTrainer):
    """A trainer that reports its steps as a real one does, and forgets them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(steps=STEPS, groups=4, max_lag=2, order="finished", **settings)
        self.accounts, self.selection = StepAccountant(), SelectionMeter()
        self.recorder = RunRecorder(strategy="fully_async", max_lag=2, started_unix=0.0)
        self.parts: list[object] = []
        """What belongs to the run besides this trainer."""
        self.files: list[EventFile] = []
        """Their threads must not lag behind when objects are counted."""
        self.counted: dict[int, Held] = {}

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        await super().finish_step(batch, facts)
        self.recorder.record(0.5, 1.0, 0.001, 0.0)
        self.accounts.take()
        self.accounts.critical_role()
        for one in (t for group in batch.groups for t in group.trajectories):
            for fate in ("finished", "trained"):
                self.selection.record(fate, tokens=one.num_tokens, seconds=1.0, reward=0.5)
        self.selection.metrics()

        # The notes of the fake itself.
        for notes in (self.calls, self.trained, self.finished, self.discarded, self.cancelled):
            notes.clear()
        if batch.step in (EARLY, LATE):
            for file in self.files:
                file.sync()
            self.counted[batch.step] = held(self, *self.parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"filtered": lambda uid: uid.endswith(".1")}, id="filtered"),
        pytest.param({"straggler": "regenerate", "depth": 1}, id="regenerated"),
    ],
)
def test_a_run_ten_times_as_long_holds_no_more_objects(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_module, "KEPT_PUBLICATIONS", KEPT)
    trainer = ObservedTrainer(answer_s=lambda step, index: 0.5 + (step * 7 + index) % 5, **settings)
    observers = Observers(lambda line: None, strict=True)
    flow = AsyncTrainingFlow(trainer, keep_records=KEPT, guard=observers.subscriber)
    for subscriber in (OverlapMeter(), trainer.accounts):
        flow.log.subscribe(subscriber)
    with EventFile(tmp_path / "events.jsonl") as events, EventFile(tmp_path / "ledger.jsonl") as ledger:
        flow.log.subscribe(events)
        flow.ledger.subscribe(ledger)
        trainer.parts, trainer.files = [flow, observers], [events, ledger]
        result = run_virtual(flow.run())

    assert (result.steps, result.weight_updates) == (STEPS, STEPS + 1)
    early, late = trainer.counted[EARLY], trainer.counted[LATE]
    assert late.objects - early.objects < SLACK, "fewer than one object in six steps"
    assert late.entries - early.entries < SLACK, "fewer than one entry in six steps"
