# SPDX-License-Identifier: Apache-2.0
"""A CancelledError that no stop caused ends the run at once, in whichever method of a stage it appears."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from recipe.async_pipeline import AsyncTrainingFlow, RoleStateMachine, register_role
from recipe.async_pipeline.core.concurrent_stage import ConcurrentStage
from recipe.async_pipeline.core.stage import ROLES, Pipeline
from recipe.async_pipeline.core.state_machine import StageState
from recipe.async_pipeline.core.waits.background import no_stray_cancellation
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import StrayCancellation
from tests.fakes.trainer import SimTrainer


class Leaking:
    """A stage one of whose methods raises CancelledError at the second item."""

    leaks = ""
    seen = 0

    def leak(self, method: str) -> None:
        if method == self.leaks:
            raise asyncio.CancelledError

    async def gate(self, item: Any) -> None:
        self.leak("gate")

    async def receive(self) -> Any:
        self.leak("receive")
        return await super().receive()  # type: ignore[misc]

    async def process(self, item: Any) -> None:
        await asyncio.sleep(0.1)
        self.leak("process")
        await self.emit(item)  # type: ignore[attr-defined]

    async def drained(self) -> None:
        self.leak("drained")

    def describe_item(self, item: Any) -> dict[str, Any]:
        self.leak("describe_item")
        return super().describe_item(item)  # type: ignore[misc, no-any-return]

    def split(self, item: Any) -> Iterable[Any]:
        self.leak("split")
        return (item,)


class One(Leaking, RoleStateMachine):
    """One item at a time."""


class Many(Leaking, ConcurrentStage):
    """All items at once."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_role("one")(One)
    register_role("many")(Many)
    yield
    del ROLES["one"], ROLES["many"]


METHODS = ("gate", "receive", "process", "drained", "describe_item")


@pytest.mark.parametrize(
    ("stage", "method"),
    [*(("one", method) for method in METHODS), *(("many", method) for method in (*METHODS, "split"))],
)
def test_it_ends_the_run_at_once_with_the_name_of_the_stage(
    stage: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Leaking, "leaks", method)
    flow = AsyncTrainingFlow(SimTrainer(steps=3))
    flow.insert(stage, after="reward", before="train")
    with pytest.raises(StrayCancellation, match=f"stage {stage} .*raised CancelledError, but the run is not"):
        run_virtual(flow.run())

    assert flow.log.records[-1].t < 20.0, "no stage waited until a deadline"
    states = {machine.name: machine.state for machine in flow.machines}
    assert states.pop(stage) is StageState.FAILED
    assert StageState.FAILED not in states.values()


def test_the_number_of_lanes_is_checked_too() -> None:
    class NoLanes(One):
        @classmethod
        def lanes(cls, pipeline: Pipeline) -> int:
            raise asyncio.CancelledError

    ROLES["one"] = NoLanes
    flow = AsyncTrainingFlow(SimTrainer())
    flow.insert("one", after="reward", before="train")
    with pytest.raises(StrayCancellation, match="the wiring of the stages"):
        run_virtual(flow.run())


TRAINER = (
    "draw_prompts",
    "answer",
    "assemble",
    "compute_log_probs",
    "compute_advantages",
    "update",
    "finish_step",
    "gather",
    "publish",
    "validate",
    "watch",
)


@pytest.mark.parametrize("method", TRAINER)
def test_so_does_one_that_comes_out_of_the_trainer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leak(*args: Any) -> None:
        await asyncio.sleep(0.1)
        raise asyncio.CancelledError

    trainer = SimTrainer(steps=3)
    monkeypatch.setattr(trainer, method, leak)
    flow = AsyncTrainingFlow(trainer)
    with pytest.raises(
        StrayCancellation, match=r"^(stage |the trainer|\w+ in background).* raised CancelledError"
    ):
        run_virtual(flow.run())
    assert flow.log.records[-1].t < 20.0


def test_a_task_that_cancels_itself_is_no_stop() -> None:
    class CancelsItself(SimTrainer):
        async def assemble(self, step: int, groups: Any) -> Any:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    with pytest.raises(StrayCancellation, match=r"stage rollout \(RUNNING, step 1"):
        run_virtual(AsyncTrainingFlow(CancelsItself()).run())


@pytest.mark.parametrize("stopping", [False, True])
def test_a_stop_passes_through(stopping: bool) -> None:
    expected = asyncio.CancelledError if stopping else StrayCancellation
    with pytest.raises(expected), no_stray_cancellation(lambda: "it", lambda: stopping):
        raise asyncio.CancelledError
