# SPDX-License-Identifier: Apache-2.0
"""The call lasts until its prompts have ended, and removes first what a process that died has stored."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from tests import HANG_S

pytestmark = pytest.mark.real_engine


class Store:
    """A sample store with the prompts and responses of two workers."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tags: dict[str, dict[str, Any]] = {uid: {"is_prompt": True} for uid in ("a-1", "a-2", "b-1")}
        self.tags |= {key: {"status": "success"} for key in ("a-1_0_0", "a-1_0_1", "b-1_0_0")}
        monkeypatch.setattr(module.tq, "async_kv_list", self._list)
        monkeypatch.setattr(module.tq, "async_kv_clear", self._clear)

    async def _list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        assert partition_id == "val"
        return {"val": dict(self.tags)} if self.tags else {}

    async def _clear(self, keys: list[str], partition_id: str) -> None:
        assert partition_id == "val"
        for key in keys:
            del self.tags[key]


@pytest.fixture
def store(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(module, monkeypatch)


class Prompts:
    """Tasks of prompts, as verl's worker begins them: each runs until its event."""

    def __init__(self, open_prompts: Any, *uids: str) -> None:
        self._open = open_prompts
        self.events = {uid: asyncio.Event() for uid in uids}
        self.errors: dict[str, Exception] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        self.tasks = [asyncio.create_task(self._answer(uid)) for uid in self.events]

    async def _answer(self, uid: str) -> None:
        with self._open.answering(uid):
            await self.events[uid].wait()
            if uid in self.errors:
                raise self.errors[uid]


async def pause() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_returns_when_all_prompts_have_ended(store: Store, module: ModuleType) -> None:
    opened = module.OpenPrompts()
    prompts = Prompts(opened, "a-1", "a-2")
    call = asyncio.create_task(opened.until_ended(["a-1", "a-2"], prompts.begin()))
    await pause()
    prompts.events["a-2"].set()
    await pause()
    assert not call.done()
    prompts.events["a-1"].set()
    await asyncio.wait_for(call, HANG_S)
    assert not opened._ends


async def test_only_responses_to_its_own_prompts_are_removed(store: Store, module: ModuleType) -> None:
    """A second conversation of an agent that the repeated episode does not have would be its last row."""
    opened = module.OpenPrompts()
    prompts = Prompts(opened, "a-1", "a-2")
    for event in prompts.events.values():
        event.set()
    await asyncio.wait_for(opened.until_ended(["a-1", "a-2"], prompts.begin()), HANG_S)
    assert set(store.tags) == {"a-1", "a-2", "b-1", "b-1_0_0"}


async def test_a_task_that_fails_ends_the_call_with_its_error(store: Store, module: ModuleType) -> None:
    """verl's task catches the errors of agent loops; the others, of the sample store, would be waited for."""
    opened = module.OpenPrompts()
    prompts = Prompts(opened, "a-1", "a-2")
    prompts.errors["a-1"] = ConnectionError("the store is gone")
    call = asyncio.create_task(opened.until_ended(["a-1", "a-2"], prompts.begin()))
    await pause()
    prompts.events["a-1"].set()
    with pytest.raises(ConnectionError, match="the store is gone"):
        await asyncio.wait_for(call, HANG_S)
    prompts.events["a-2"].set()
    await asyncio.gather(*prompts.tasks, return_exceptions=True)


def test_tasks_of_other_calls_are_no_concern(module: ModuleType) -> None:
    with module.OpenPrompts().answering("c-1"):
        pass
