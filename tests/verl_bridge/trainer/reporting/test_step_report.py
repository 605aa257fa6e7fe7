# SPDX-License-Identifier: Apache-2.0
"""The report of a step runs while the next step trains, and its errors are never lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.core.groups.items import Group, StepBatch, Trajectory
from recipe.async_pipeline.observe.observers import Observers
from recipe.async_pipeline.observe.trackers import Trackers
from tests import HANG_S
from tests.conftest import Load
from tests.fakes.trainer import SimTrainer

pytestmark = pytest.mark.real_engine

FACTS = {
    "lag/mean": 0.0,
    "lag/max": 0.0,
    "version/served_min": 0.0,
    "queue/untrained": 0.0,
    "queue/finished": 0.0,
    "train/skipped_updates": 0.0,
}


class Tracker:
    """Two trackers, of which one may fail."""

    def __init__(self) -> None:
        self.fails = False
        self.last: Any = None
        self.logged: list[tuple[str, int]] = []

    def connect(self, name: str) -> Any:
        log = partial(self.log, name)
        return SimpleNamespace(logger={name: self}, log=log, finish=lambda: None)

    def log(self, name: str, *, data: Any, step: int) -> None:
        self.last = data
        if self.fails and name == "bad":
            raise ConnectionError("no route to host")
        self.logged.append((name, step))


class Parts:
    """A StepReport with fakes; `freed` holds the steps whose samples were freed."""

    def __init__(self, module: Any, calls: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.freed: list[int] = []
        self.may_free = threading.Event()
        self.may_free.set()
        self.error: Exception | None = None
        self.metrics: dict[str, float] = {}
        self.facts: dict[str, float] = FACTS
        self.said: list[str] = []
        self.tracker, self.observers = Tracker(), Observers(self.said.append)
        monkeypatch.setattr(module.tq, "kv_clear", self._free)
        monkeypatch.setattr(module, "own_copy", lambda payload: payload)
        monkeypatch.setattr(module, "say", self.said.append)
        monkeypatch.setattr(module, "echo", lambda line: None)
        quiet = SimpleNamespace(
            _compute_metrics=lambda *args, **kwargs: None, metrics=dict, show=lambda metrics: None
        )
        schedule = SimTrainer(**settings).schedule
        self.report = module.StepReport(
            schedule=schedule,
            saves=schedule.saves,
            calls=calls,
            stages=SimpleNamespace(at=lambda step: quiet),
            publisher=SimpleNamespace(rollout_pool=SimpleNamespace(versions={}), metrics=dict),
            meters=SimpleNamespace(
                selection=lambda: ({}, None),
                distances=lambda batch: ({"off_policy/ess/all": 1 / batch.step}, None),
                stored=lambda: 4,
                share="off_policy/ess/all",
            ),
            bad_data=quiet,
            accounts=SimpleNamespace(take=dict, critical_role=str),
            observers=self.observers,
            recorder=SimpleNamespace(record=lambda *args: None),
            gauges=quiet,
            trackers=Trackers(["good", "bad"], self.tracker.connect, None, self.observers),
            steps_per_epoch=1,
            rollout_data_dir=None,
        )

    def _free(self, *, keys: int, partition_id: str) -> None:
        assert self.may_free.wait(HANG_S)
        if self.error is not None:
            raise self.error
        self.freed.append(keys)

    async def finish(self, step: int) -> float | None:
        one = Trajectory(key=f"{step}", first_version=0, last_version=0, num_tokens=1, reward=1.0)
        payload = SimpleNamespace(keys=step, partition_id="train")
        group = Group(uid=f"{step}", step=step, trajectories=(one,))
        batch = StepBatch(step=step, groups=(group,), payload=payload, metrics=self.metrics)
        share: float | None = await self.report.finish(batch, self.facts)
        return share


PartsOf = Callable[..., Parts]


@pytest.fixture
def parts_of(module: Any, calls: Any, monkeypatch: pytest.MonkeyPatch) -> PartsOf:
    return partial(Parts, module, calls, monkeypatch)


@pytest.fixture
def calls(load: Load) -> Iterator[Any]:
    made = load("recipe.async_pipeline.verl_bridge.calls.ray_calls").BlockingCalls(HANG_S)
    yield made
    made.close()


async def test_the_next_step_does_not_wait_but_the_one_after_does(parts_of: PartsOf) -> None:
    parts = parts_of()

    parts.report.begin()
    parts.may_free.clear()
    await asyncio.wait_for(parts.finish(1), HANG_S)
    second = asyncio.create_task(parts.finish(2))
    await asyncio.sleep(0)
    assert not second.done() and parts.freed == []
    parts.may_free.set()
    await asyncio.wait_for(second, HANG_S)
    assert parts.freed[0] == 1
    await parts.report.close()
    assert parts.freed == [1, 2]
    assert parts.tracker.logged == [(name, step) for step in (1, 2) for name in ("good", "bad")]


@pytest.mark.parametrize(("settings", "step"), [({"save_every": 2}, 2), ({"steps": 3}, 3)])
async def test_a_saved_step_and_the_last_one_are_reported_at_once(
    parts_of: PartsOf, settings: dict[str, int], step: int
) -> None:
    parts = parts_of(**settings)
    parts.observers.failed("a meter", ValueError("x"), lost="without it")

    parts.report.begin()
    await parts.finish(step)
    assert parts.freed == [step]
    assert parts.tracker.last["async_pipeline/sample_store/rows"] == 5.0, "its own row and 4 others"
    assert parts.tracker.last["async_pipeline/observers/off"] == 1.0


async def test_the_share_of_each_report_is_returned_once(parts_of: PartsOf) -> None:
    parts = parts_of(steps=9, save_every=2)
    parts.report.begin()
    assert await parts.finish(1) is None
    assert await parts.finish(2) == 1 / 2, "a saved step is reported at once"
    parts.may_free.clear()
    assert await parts.finish(3) is None
    parts.may_free.set()
    assert await parts.finish(4) == 1 / 4
    await parts.report.close()


async def test_a_tracker_that_fails_holds_up_no_other(parts_of: PartsOf) -> None:
    parts = parts_of()
    parts.tracker.fails = True

    parts.report.begin()
    for step in (1, 2, 3):
        await parts.finish(step)
    await parts.report.close()
    assert parts.tracker.logged == [("good", 1), ("good", 2), ("good", 3)]
    assert parts.observers.off == {"the tracker bad": "ConnectionError: no route to host"}
    assert [line.split(" fails: ")[0].split(" is ")[0] for line in parts.said] == ["the tracker bad"] * 2


async def test_a_step_whose_update_was_skipped_is_named(parts_of: PartsOf) -> None:
    parts = parts_of()

    parts.report.begin()
    parts.metrics["actor/grad_norm"] = float("nan")
    parts.facts = {**FACTS, "train/skipped_updates": 2.0}
    await parts.finish(1)
    parts.facts = {**FACTS, "train/skipped_updates": 11.0}
    await parts.finish(2)
    await parts.report.close()
    assert parts.said == [
        "the update of step 1 was skipped, or that of a mini-batch: actor/grad_norm is nan; 2 such steps so "
        "far"
    ]


async def test_a_report_that_cannot_free_its_samples_ends_the_run(parts_of: PartsOf) -> None:
    parts = parts_of()
    parts.error = ConnectionError("the sample store is gone")

    parts.report.begin()
    watching = asyncio.create_task(parts.report.watch())
    await parts.finish(1)
    with pytest.raises(ConnectionError, match="sample store"):
        await asyncio.wait_for(watching, HANG_S)
    with pytest.raises(ConnectionError, match="sample store"):
        await parts.finish(2)
    await parts.report.close()


async def test_a_run_that_ends_early_keeps_its_last_report(parts_of: PartsOf) -> None:
    parts = parts_of()

    parts.report.begin()
    watching = asyncio.create_task(parts.report.watch())
    await parts.finish(1)
    watching.cancel()
    await asyncio.wait([watching])
    await parts.report.close()
    assert parts.tracker.logged == [("good", 1), ("bad", 1)]
