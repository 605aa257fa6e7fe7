# SPDX-License-Identifier: Apache-2.0
"""Agents and rewards import nothing of this package; the other examples run with Python alone."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from recipe.async_pipeline.agents.frozen_lake import FrozenLake
from recipe.async_pipeline.agents.processes.sandbox import Folder
from recipe.async_pipeline.agents.runners import AgentSpec, Policy, Task, runner_of
from recipe.async_pipeline.gateway.registry import Sessions
from recipe.async_pipeline.gateway.sessions import Session, SessionLimits
from tests import HANG_S, REPOSITORY
from tests.fakes.agent_policy import FakePolicy

OF_THE_PIPELINE = {"hello_pipeline", "my_stage", "my_strategy"}
OUTSIDE = sorted(path for path in (REPOSITORY / "examples").glob("*.py") if path.stem not in OF_THE_PIPELINE)
LAKE = REPOSITORY / "examples" / "lake_agent.py"
OPENAI = REPOSITORY / "examples" / "openai_agent.py"


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.stem)
def test_an_agent_or_a_reward_imports_nothing_of_this_package(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level and not (node.module or "").startswith("recipe")
        elif isinstance(node, ast.Import):
            assert not any(one.name.startswith("recipe") for one in node.names)


def run_alone(name: str) -> str:
    """Run an example in a Python without any installed package; return what it printed."""
    path = str(REPOSITORY / "examples" / f"{name}.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", path], env=environment, cwd="/", capture_output=True, text=True, check=True
    )
    return done.stdout


def test_hello_pipeline_shows_the_four_strategies() -> None:
    shown = run_alone("hello_pipeline")
    found = re.findall(r"(\w+): (\S+) s, .* lag (\d) of at most (\d); 48 of 48 prompts trained", shown)
    assert found == [
        ("OnPolicy", "45.0", "0", "0"),
        ("OneStepOff", "25.8", "1", "1"),
        ("NStepAhead", "19.5", "3", "3"),
        ("FullyAsync", "18.6", "3", "3"),
    ]
    lanes = [line.partition("|")[2] for line in shown.splitlines() if "|" in line]
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    printed = readme.partition("```\nOnPolicy")[2].partition("```")[0]
    assert printed and all(line in shown.splitlines() for line in f"OnPolicy{printed}".splitlines())
    assert len(lanes) == 12 and {len(lane) for lane in lanes} == {65} and all("#" in lane for lane in lanes)


def test_my_strategy_is_between_its_two_bounds() -> None:
    seconds = dict(re.findall(r"^(\w+): (\S+) s", run_alone("my_strategy"), re.MULTILINE))
    assert float(seconds["NStepAhead"]) < float(seconds["Cautious"]) < 45.0


def test_my_stage_sees_every_batch() -> None:
    steps = re.findall(r"'step': (\d+), 'oldest': \d+, 'responses': 4", run_alone("my_stage"))
    assert steps == [str(step) for step in range(1, 13)]


def test_the_openai_agent_has_the_versions_of_the_lock() -> None:
    """The tests run it with these."""
    wanted = [line for line in OPENAI.with_suffix(".txt").read_text().splitlines() if line and line[0] != "#"]
    locked = (REPOSITORY / "run_scripts" / "cpu.lock.txt").read_text().splitlines()
    assert wanted and set(wanted) <= set(locked)


@pytest.fixture
def lake_agent(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("openai", "gymnasium", "starlette", "uvicorn"):
        pytest.importorskip(name)
    spec = importlib.util.spec_from_file_location("lake_agent", LAKE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lake_agent", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "agent",
    ["lake_agent:play", *(shlex.join([sys.executable, str(one)]) for one in (LAKE, OPENAI))],
    ids=["function", "command", "openai"],
)
def test_an_agent_plays_the_lake_of_the_environment(lake_agent: ModuleType, agent: str) -> None:
    """It sees what the agent loop `environment` would show, and gets the same reward."""
    from recipe.async_pipeline.gateway.app import Gateway
    from recipe.async_pipeline.gateway.server import GatewayServer

    lake, seed = FrozenLake(), 7
    texts, moves = [lake.reset(seed)], "DRDRDRDR"
    reward = 0.0
    for move in moves:
        step = lake.step(move)
        texts.append(step.observation)
        reward += step.reward
        if step.over:
            break

    async def play() -> tuple[float | None, list[str]]:
        sessions, policy = Sessions(), FakePolicy(*moves)
        session = Session(policy, SessionLimits(prompt_tokens=1000, response_tokens=1000))
        sessions.add(session)
        server = GatewayServer(Gateway(sessions).app)
        await server.start()
        runner = runner_of(
            AgentSpec(agent=agent, env={"PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "")})
        )
        task = Task({"messages": [], "seed": seed, "task": {}}, {})
        with Folder() as folder:
            found = await runner.run(task, Policy(f"{server.url}/v1", session.keys.model), folder)
        if lake_agent.CLIENT is not None:  # no episode closes it: it serves all
            await lake_agent.CLIENT.close()
        await server.stop()
        (row,) = session.rows()
        whole = bytes(token for token in row.prompt_ids + row.response_ids if token < 256).decode()
        return found, whole.split("<user>")[1:]

    found, seen = asyncio.run(asyncio.wait_for(play(), HANG_S))
    assert found == reward
    assert [text.removesuffix(move) for text, move in zip(seen, moves, strict=False)] == texts[: len(seen)]


@pytest.fixture
def image_rewards() -> ModuleType:
    for name in ("numpy", "PIL"):
        pytest.importorskip(name)
    path = REPOSITORY / "examples" / "image_rewards.py"
    spec = importlib.util.spec_from_file_location("image_rewards", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_plain_picture_compresses_better_than_noise(image_rewards: ModuleType) -> None:
    import numpy as np

    plain = np.full((3, 16, 16), 200, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (3, 16, 16)).astype(np.uint8)
    scores = [image_rewards.jpeg_size("", one, "", None) for one in (plain, noise)]
    assert scores[1] < scores[0] < 0


def test_a_server_scores_the_picture_that_it_is_sent(
    image_rewards: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    picture = np.zeros((3, 16, 16), np.uint8)
    picture[2, 8:, 8:] = 90
    with ThreadingHTTPServer(("127.0.0.1", 0), image_rewards.Judge) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            monkeypatch.setenv(image_rewards.URL, f"http://127.0.0.1:{server.server_address[1]}")
            found = [image_rewards.ask_server("", picture, colour)["score"] for colour in ("blue x", "red x")]
        finally:
            server.shutdown()
            serving.join()
    assert found == [1.0, 0.0]
