# SPDX-License-Identifier: Apache-2.0
"""A group that is given up ends, whenever that is heard of."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import Load

pytestmark = pytest.mark.real_engine

PROMPT = {"uid": ["a"]}


@pytest.fixture
def agent_loop(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.agent_loop.worker")


def worker_of(agent_loop: ModuleType, before: asyncio.Event) -> Any:
    """verl's part stands still until `before` is set; the answer itself never comes."""

    class Worker(agent_loop.PushAgentLoopWorker):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self._groups, self._finished, self._before, self._answering, self._transcripts = (
                {},
                {},
                {},
                {},
                {},
            )
            self._given_up = set()
            self.begun = 0

        async def generate_sequences(self, prompt: Any) -> None:
            await before.wait()
            asyncio.get_running_loop().create_task(self._run_prompt({"uid": "a"}, {}, {}))

        async def _answer(self, *args: Any) -> Any:
            self.begun += 1
            await asyncio.get_running_loop().create_future()

    return Worker()


@pytest.mark.parametrize("begun", [False, True])
def test_a_group_that_is_given_up_ends_with_nothing(agent_loop: ModuleType, begun: bool) -> None:
    async def story() -> None:
        before = asyncio.Event()
        worker = worker_of(agent_loop, before)
        group = asyncio.create_task(worker.run_group(PROMPT))
        if begun:
            before.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert worker.begun == begun
        await worker.give_up("a")
        before.set()
        assert await asyncio.wait_for(group, 5) == agent_loop.Answered([], [])
        assert worker.begun == begun, "no engine was asked for it afterwards"
        assert not (worker._groups or worker._answering or worker._given_up)

    asyncio.run(story())


def test_one_that_is_over_is_left_alone(agent_loop: ModuleType) -> None:
    async def story() -> None:
        worker = worker_of(agent_loop, asyncio.Event())
        await worker.give_up("a")
        assert not worker._given_up

    asyncio.run(story())
