# SPDX-License-Identifier: Apache-2.0
"""Runners of agents: what an agent gets, where its reward comes from, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.agents.processes.command_process import file_in_memory
from recipe.async_pipeline.agents.processes.sandbox import Folder
from recipe.async_pipeline.agents.runners import AgentSpec, Policy, Task, is_function, runner_of, verified
from recipe.async_pipeline.errors import AgentFailed, ConfigError, EnvironmentFailed
from tests import HANG_S

POLICY = Policy("http://127.0.0.1:1/v1", "sk-model-x")
TASK = Task({"messages": [{"role": "user", "content": "go"}], "seed": 3, "task": {"a": 1}}, {"truth": 42})
HERE = __name__


def played(agent: str, policy: Policy = POLICY, **more: Any) -> float | None:
    spec = AgentSpec(agent=agent, **more)

    async def episode() -> float | None:
        with Folder() as folder:
            reward = await runner_of(spec).run(TASK, policy, folder)
            return reward if spec.verify is None else await verified(spec, folder, TASK)

    return asyncio.run(asyncio.wait_for(episode(), HANG_S))


def python(code: str) -> str:
    return shlex.join([sys.executable, "-I", "-c", code])


def plain(task: dict[str, Any], policy: Policy) -> float:
    assert policy == POLICY and task == TASK.shown
    return 0.5


async def waiting(task: dict[str, Any], policy: Policy) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"reward": task["seed"]}


def decorated(task: dict[str, Any], policy: Policy) -> Any:
    """A plain decorator around an async function looks so."""
    return waiting(task, policy)


def silent(task: dict[str, Any], policy: Policy) -> None:
    pass


def raising(task: dict[str, Any], policy: Policy) -> None:
    raise ValueError("no such move")


def leaving(task: dict[str, Any], policy: Policy) -> None:
    sys.exit(3)


async def raising_late(task: dict[str, Any], policy: Policy) -> None:
    raise StopAsyncIteration("odd")


begun, release = threading.Event(), threading.Event()


def hanging(task: dict[str, Any], policy: Policy) -> None:
    begun.set()
    release.wait()


def talkative(task: dict[str, Any], policy: Policy) -> str:
    return "0.5"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agents_of_tests", sys.modules[HERE])


@pytest.mark.parametrize(
    ("name", "reward"), [("plain", 0.5), ("waiting", 3.0), ("decorated", 3.0), ("silent", None)]
)
def test_a_function_gives_a_reward_or_none(name: str, reward: float | None) -> None:
    assert played(f"agents_of_tests:{name}") == reward


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raising", "ValueError: no such move"),
        ("leaving", "SystemExit: 3"),
        ("raising_late", "StopAsyncIteration: odd"),
        ("talkative", "the reward must be a finite number, got '0.5'"),
    ],
)
def test_a_function_that_fails(name: str, why: str) -> None:
    with pytest.raises(AgentFailed, match=why):
        played(f"agents_of_tests:{name}")


@pytest.mark.parametrize("agent", ["agents_of_tests:none", "no_such_module:agent"])
def test_a_function_that_does_not_exist(agent: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        runner_of(AgentSpec(agent=agent))


@pytest.mark.parametrize(
    ("agent", "function"),
    [("a.b:c", True), ("agent:run", True), ("python a.py", False), ("./agent", False), ("a:b:c", False)],
)
def test_functions_and_commands(agent: str, function: bool) -> None:
    assert is_function(agent) is function


def test_a_command_gets_its_task_and_the_policy(tmp_path: Path) -> None:
    code = (
        "import json, os; task = json.load(open(os.environ['ASYNC_PIPELINE_TASK'])); "
        f"json.dump([task, dict(os.environ), os.getcwd()], open({str(tmp_path / 'seen')!r}, 'w')); "
        "print('log'); print(json.dumps({'reward': 0.25}))"
    )
    assert played(python(code), env={"MINE": "1"}) == 0.25
    task, env, cwd = json.loads((tmp_path / "seen").read_text())
    assert task == TASK.shown
    assert env["OPENAI_BASE_URL"] == POLICY.base_url and env["OPENAI_API_KEY"] == POLICY.api_key
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
    assert env["ANTHROPIC_API_KEY"] == POLICY.api_key
    assert env["HOME"] == env["TMPDIR"] == cwd and env["MINE"] == "1"
    assert "ASYNC_PIPELINE_CONTROL_KEY" not in env, "it cannot set its own reward"
    assert "ASYNC_PIPELINE_UNIX_SOCKET" not in env
    assert not Path(cwd).exists(), "its folder is deleted"


def test_a_command_that_may_set_its_reward_has_the_control_key() -> None:
    code = "import json, os; print(json.dumps({'reward': len(os.environ['ASYNC_PIPELINE_CONTROL_KEY'])}))"
    assert played(python(code), policy=POLICY._replace(control_key="four")) == 4.0


def test_a_command_learns_of_the_unix_socket() -> None:
    code = "import json, os; print(json.dumps({'reward': len(os.environ['ASYNC_PIPELINE_UNIX_SOCKET'])}))"
    assert played(python(code), policy=POLICY._replace(unix_socket="/a/b")) == 4.0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no')", "exit status 1: no"),
        ('print(\'{"reward": "high"}\')', "the reward must be a finite number, got 'high'"),
        ("print('{\"reward\": NaN}')", "the reward must be a finite number, got nan"),
    ],
)
def test_a_command_that_fails(code: str, why: str) -> None:
    with pytest.raises(AgentFailed, match=why):
        played(python(code))


def test_a_command_without_a_reward() -> None:
    assert played(python("print('bye')")) is None


VERIFY = (
    "import json, os, pathlib; task = json.load(open(os.environ['ASYNC_PIPELINE_TASK'])); "
    "assert 'OPENAI_API_KEY' not in os.environ; "
    "found = pathlib.Path('answer').read_text() if os.path.exists('answer') else '0'; "
    "print(json.dumps({'reward': float(int(found) == task['truth'])}))"
)


@pytest.mark.parametrize(("answer", "reward"), [(42, 1.0), (41, 0.0)])
def test_verify_judges_instead_of_the_agent(answer: int, reward: float) -> None:
    code = (
        f"open('answer', 'w').write('{answer}'); import os; "
        "assert 'truth' not in open(os.environ['ASYNC_PIPELINE_TASK']).read(); print('{\"reward\": 100}')"
    )
    assert played(python(code), verify=python(VERIFY)) == reward


def test_verify_judges_a_function_too() -> None:
    assert played("agents_of_tests:plain", verify=python(VERIFY)) == 0.0


@pytest.mark.parametrize(
    "forges",
    [
        "open('json.py', 'w').write('print(1)')",
        f"os.remove('task.json'); os.symlink({os.devnull!r}, 'task.json')",
        "os.chmod('.', 0o500)",
    ],
)
def test_what_an_agent_leaves_in_its_folder_does_not_judge_it(forges: str) -> None:
    judge = shlex.join([sys.executable, "-c", VERIFY])
    assert played(python(f"import os; {forges}"), verify=judge) == 0.0


def test_the_place_of_the_ground_truth_cannot_be_foretold() -> None:
    """An agent could leave a link to it in place of its answer, which a judge would read."""
    found = set()
    for _ in range(40):
        path = Path(file_in_memory("secret"))
        assert path.read_text() == "secret"
        os.close(int(path.name))
        found.add(path)
    assert len(found) > 20, "not the lowest one that is free"


def test_verify_has_a_separate_home() -> None:
    code = (
        "import json, os; home = os.environ['HOME']; assert home == os.environ['TMPDIR'] != os.getcwd(); "
        "assert os.environ['ASYNC_PIPELINE_TASK'].startswith('/dev/fd/'); "
        "assert os.environ['PYTHONNOUSERSITE'] == '1'; "
        "print(json.dumps({'reward': int('mark' in os.listdir() and 'mark' not in os.listdir(home))}))"
    )
    assert played("touch mark", verify=python(code), env={"ASYNC_PIPELINE_TASK": "none"}) == 1.0


@pytest.mark.parametrize(
    ("code", "why"),
    [("raise SystemExit('broken')", "verify: exit status 1: broken"), ("print('fine')", "verify must print")],
)
def test_a_verify_that_fails_is_not_the_agents_fault(code: str, why: str) -> None:
    with pytest.raises(EnvironmentFailed, match=why):
        played("agents_of_tests:plain", verify=python(code))


async def test_an_agent_that_hangs_in_a_thread_does_not_hold_up_its_episode() -> None:
    runner = runner_of(AgentSpec(agent="agents_of_tests:hanging"))
    task = asyncio.create_task(runner.run(TASK, POLICY, Folder()))
    await asyncio.get_running_loop().run_in_executor(None, begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
