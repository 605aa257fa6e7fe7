# SPDX-License-Identifier: Apache-2.0
"""The program plays FrozenLake over HTTP, and sends requests again if it is to."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.agents.frozen_lake import ACTIONS, MOVES, board_of
from recipe.async_pipeline.agents.processes.commands import environment, run_command
from recipe.async_pipeline.lab.soak import lake_agent
from tests import REPOSITORY
from tests.fakes.agent_policy import LIMITS, FakePolicy
from tests.fakes.served_gateway import Served, served

SEED = 3


@pytest.fixture(autouse=True)
def _packages() -> None:
    for name in ("gymnasium", "starlette", "uvicorn"):
        pytest.importorskip(name)


def way(seed: int) -> str:
    """Return the actions of a way to the goal."""
    board, ways = board_of(seed), {(0, 0): ""}
    while True:
        for (row, column), actions in list(ways.items()):
            if board[row][column] == "G":
                return actions
            for action, (down, right) in zip(ACTIONS, MOVES, strict=True):
                near = row + down, column + right
                if min(near) >= 0 and max(near) < 4 and board[near[0]][near[1]] != "H":
                    ways.setdefault(near, actions + action)


def played(at: Served, control: Path, *, is_bad: bool) -> Any:
    policy = lake_agent.PolicyChat(f"{at.url}/v1", at.session.keys.model)
    play: Callable[[], float] = lambda: lake_agent.play({"seed": SEED}, policy, control, is_bad=is_bad)  # noqa: E731
    return asyncio.get_running_loop().run_in_executor(None, play)


async def test_it_plays_to_the_goal_and_ends_at_the_limit_of_turns(tmp_path: Path) -> None:
    actions = way(SEED)
    async with served(FakePolicy(*actions)) as at:
        assert await played(at, tmp_path / "mood", is_bad=True) == 1.0
        assert at.session.counts.turns == len(actions) and len(at.session.rows()) == 1
    async with served(FakePolicy(*"LLLL"), limits=replace(LIMITS, max_turns=3)) as at:
        assert await played(at, tmp_path / "mood", is_bad=True) == 0.0
        assert at.session.limit_hit == "turns"


@pytest.mark.slow
@pytest.mark.parametrize("is_bad", [True, False])
def test_requests_that_are_sent_again_cost_no_generation(tmp_path: Path, is_bad: bool) -> None:
    control = tmp_path / "mood"
    control.write_text(lake_agent.RETRY)

    async def test() -> None:
        actions = way(SEED)
        async with served(FakePolicy(*actions)) as at:
            assert await played(at, control, is_bad=is_bad) == 1.0
            assert len(at.policy.prompts) == at.session.counts.turns == len(actions)
            assert at.session.counts.coalesced == (2 * (len(actions) - 1) if is_bad else 0)

    asyncio.run(test())
    assert Path(f"{control}.seen").exists() is is_bad
    assert not Path(f"{control}.complaint").exists()


def test_another_answer_is_a_complaint(tmp_path: Path) -> None:
    control = tmp_path / "mood"

    class Forgetful(lake_agent.PolicyChat):
        def leave(self, messages: lake_agent.Messages) -> None: ...

        def ask(self, messages: lake_agent.Messages, attempt: int = 0) -> str:
            return "LD"[attempt - 1]

    assert lake_agent.insist(Forgetful("", ""), [], control) == "L"
    assert Path(f"{control}.complaint").read_text() == (
        "a request that was sent again got 'D' instead of 'L'"
    )


@pytest.mark.slow
def test_it_runs_as_a_command_and_can_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, task, always = tmp_path / "mood", tmp_path / "task.json", tmp_path / "sitecustomize.py"
    task.write_text(f'{{"seed": {SEED}}}')
    # Each of them is the one in four.
    always.write_text("import random\nrandom.randrange = lambda n: 0\n")

    async def run(*answers: str) -> Any:
        async with served(FakePolicy(*answers)) as at:
            reached = {"OPENAI_BASE_URL": f"{at.url}/v1", "OPENAI_API_KEY": at.session.keys.model}
            path = f"{REPOSITORY}:{tmp_path}"
            env = environment({"ASYNC_PIPELINE_TASK": str(task), "PYTHONPATH": path, **reached})
            command = [sys.executable, "-m", lake_agent.__name__, str(control)]
            return await run_command(command, tmp_path, env)

    finished = asyncio.run(run(*way(SEED)))
    assert (finished.status, finished.last_object()) == (0, {"reward": 1.0}), finished.in_words()
    control.write_text("die")
    assert asyncio.run(run(*way(SEED))).status == 128 + signal.SIGKILL
    assert Path(f"{control}.seen").exists()
