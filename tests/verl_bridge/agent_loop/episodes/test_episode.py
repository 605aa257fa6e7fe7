# SPDX-License-Identifier: Apache-2.0
"""Rows have different places, also in data without an index."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.agents.episodes import EndPolicies, EpisodeRules
from recipe.async_pipeline.core.groups.bad_data import Flaw
from recipe.async_pipeline.errors import RolloutError, WaitTimeout
from recipe.async_pipeline.verl_bridge import replaced
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import current_attempt
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode_attempts import Episodes
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


def row(text: str, **more: Any) -> dict[str, Any]:
    return {"raw_prompt": [{"role": "user", "content": text}], "index": 0, **more}


def test_an_index_of_the_data_is_the_place(load: Load) -> None:
    place_of = load("recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode").place_of
    assert place_of(row("a", extra_info={"index": 0})) == 0
    assert place_of(row("a", extra_info={"index": np.int64(7)}, index=np.int64(7))) == 7
    assert place_of(row("a", extra_info={"index": "q-3"}, index="q-3")) == "q-3"


def test_without_an_index_prompt_and_task_are_the_place(load: Load) -> None:
    place_of = load("recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode").place_of
    places = [
        place_of(one)
        for one in (
            row("a"),
            row("b"),
            row("a", extra_info={"task": {"size": 4}}),
            row("a", extra_info={"task": {"size": 5}}),
        )
    ]
    assert len(set(places)) == 4
    assert places[0] == place_of(row("a", extra_info={"split": "train"})), "nothing else changes it"


SCHEMA = {"type": "function", "function": {"name": "t", "description": "", "parameters": {}}}


@pytest.fixture
def verls(load: Load, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """verl's module, with our changes while the test runs; calls may take half a second."""
    module = load("verl.experimental.agent_loop.tool_agent_loop")
    for owner, name in ((module.ToolAgentLoop, "_call_tool"), (module.FunctionTool, "call")):
        stock = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(stock, "__wrapped__", stock))
    replaced.apply("tools", timeout_s=0.5)
    yield module


def call(verls: ModuleType, tool: Any) -> Any:
    """Call a tool as the agent loop does: several calls are separate tasks."""
    loop = SimpleNamespace(tools={"t": tool}, max_tool_response_length=100)
    calling = verls.FunctionCall(name="t", arguments="{}")
    return asyncio.gather(verls.ToolAgentLoop._call_tool(loop, calling, {}, SimpleNamespace()))


def function(verls: ModuleType, fn: Any) -> Any:
    return verls.FunctionTool("t", fn, tool_schema=None, is_async=asyncio.iscoroutinefunction(fn))


class Stateful:
    """A tool with verl's life cycle, which hangs."""

    def __init__(self) -> None:
        self.released: list[str] = []

    async def create(self, create_kwargs: Any) -> tuple[str, None]:
        return "i", None

    async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    async def release(self, instance_id: str) -> None:
        self.released.append(instance_id)


def played(verls: ModuleType, *tools: Any) -> list[Flaw]:
    """Play an episode whose attempts call these tools, one after the other."""

    async def begin(number: int) -> None:
        await call(verls, tools[number - 1])
        attempt = current_attempt()
        assert attempt is not None
        attempt.returned([])

    episodes = Episodes(EpisodeRules.of(len(tools), EndPolicies()))
    return asyncio.run(episodes.play(begin, "a_0"))


async def test_what_a_tool_returns_or_raises_is_for_the_policy(verls: ModuleType) -> None:
    names: list[str] = []

    def fails() -> str:
        names.append(threading.current_thread().name)
        raise ValueError("of a tool")

    (found,) = await call(verls, function(verls, lambda: "4"))
    assert found[0].text == "4"
    (found,) = await call(verls, function(verls, fails))
    assert found[0].text == "Error executing tool 't': of a tool"
    assert names == ["tool t"]

    async def awaits() -> str:
        return "5"

    (found,) = await call(verls, function(verls, awaits))
    assert found[0].text == "5"
    (found,) = await call(verls, function(verls, lambda: awaits()))  # as behind a plain decorator
    assert found[0].text == "5"


def test_a_tool_that_hangs_costs_its_episode(verls: ModuleType) -> None:
    release = threading.Event()
    try:
        stateful = Stateful()
        (flaw,) = played(verls, function(verls, release.wait), stateful)
        assert (
            "attempt 2: deadline: " in flaw.why
            and "the tool t to return (agentic.tool_timeout_s)" in flaw.why
        )
        assert stateful.released == ["i"]
        assert played(verls, function(verls, release.wait), function(verls, lambda: "4")) == []
    finally:
        release.set()


def test_many_tools_that_hang_hold_up_no_other_one(verls: ModuleType) -> None:
    release = threading.Event()

    async def story() -> None:
        hanging = [asyncio.ensure_future(call(verls, function(verls, release.wait))) for _ in range(50)]
        (found,) = await call(verls, function(verls, lambda: "4"))
        assert found[0].text == "4"
        with pytest.raises(WaitTimeout, match="the tool t to return"):  # validation has no attempts
            await asyncio.gather(*hanging)
        await asyncio.wait(hanging)

    try:
        asyncio.run(story())
    finally:
        release.set()


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_tool_that_exits_costs_its_episode(verls: ModuleType, in_thread: bool) -> None:
    async def exits() -> None:
        sys.exit(3)

    tool = function(verls, (lambda: sys.exit(3)) if in_thread else exits)
    (flaw,) = played(verls, tool, tool)
    assert "attempt 2: agent_failed: RolloutError: the tool t called exit(3)" in flaw.why
    with pytest.raises(RolloutError, match="called exit"):
        asyncio.run(_called(verls, tool))


async def _called(verls: ModuleType, tool: Any) -> None:
    await call(verls, tool)
