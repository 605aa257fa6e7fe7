# SPDX-License-Identifier: Apache-2.0
"""Run an agent for one episode: a function of Python, or any command. It reaches the policy over HTTP.

    agent                                 gets                                      may give a reward by
    module:function, a coroutine or not   function(task, policy)                    returning a number
    external                              claimed tasks, outside of the run         reporting it
    anything else: a command              OPENAI_BASE_URL, OPENAI_API_KEY,          printing {"reward": 1.0}
                                          ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY,    as its last line
                                          ASYNC_PIPELINE_TASK, a JSON file

With `agentic.gateway.agent_may_reward`, an agent also gets the control key of its session
(`policy.control_key`, ASYNC_PIPELINE_CONTROL_KEY), with which it sets the reward over HTTP.

A `verify` command runs after the agent has ended, in the agent's folder, and prints the reward; then the
agent's own is not used. Another kind of runner is a class with `run` and a line in `runner_of`. The one for
`external` is in `verl_bridge`, because such programs claim their tasks from the gateway.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from ..core.waits.threads import in_new_thread
from ..errors import AgentFailed, ConfigError, EnvironmentFailed
from .processes.commands import Finished, LeftBehind, OutputLog, environment, run_command
from .processes.sandbox import Folder, Sandbox

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
TASK_FILE = "task.json"
NO_MODULES_OF_AGENTS = {"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
"""Has Python find no modules in the folder in which it runs."""


class Policy(NamedTuple):
    """Where an agent reaches the policy."""

    base_url: str
    """With `/v1`, as OpenAI's clients expect it."""
    api_key: str
    """The model key of its session."""
    control_key: str | None = None
    """The other key of its session, if the agent may set its own reward."""
    unix_socket: str | None = None
    """Where it can reach the same server without a network, if the run has `agentic.gateway.unix_dir`."""


class Task(NamedTuple):
    """What an episode is about."""

    shown: Mapping[str, Any]
    """To the agent: `messages`, `seed` and `task`."""
    hidden: Mapping[str, Any]
    """What only `verify` sees in addition, such as the ground truth."""


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """Which agent to run, and what judges it."""

    agent: str
    """`module:function`, external, or a command."""
    verify: str | None = None
    """A command."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the commands."""
    sandbox: Sandbox | None = None
    """In which the commands run."""


class Runner(Protocol):
    """Runs an agent."""

    left: LeftBehind
    """Processes of its commands that could not be ended."""

    async def run(
        self, task: Task, policy: Policy, folder: Folder, log: OutputLog | None = None
    ) -> float | None:
        """Run it for one episode, and return its reward or None if it gave none.

        `folder` is for its files, and is made if it needs one; `log` gets the output of commands. Raises
        AgentFailed. If cancelled, the agent is stopped, as far as it can be.
        """


def is_function(agent: str) -> bool:
    """Return whether an agent is a function, and not a command."""
    return FUNCTION.fullmatch(agent) is not None


def runner_of(spec: AgentSpec) -> Runner:
    """Return what runs an agent. Raises ConfigError if there is no such function."""
    return FunctionRunner(spec) if is_function(spec.agent) else CommandRunner(spec)


class FunctionRunner:
    """Calls a function: a coroutine in the event loop, another one in a thread."""

    def __init__(self, spec: AgentSpec) -> None:
        module, _, name = spec.agent.partition(":")
        try:
            self._function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"the agent {spec.agent!r} cannot be imported: {error}; correct it") from error
        self.left = LeftBehind()

    async def run(
        self, task: Task, policy: Policy, folder: Folder, log: OutputLog | None = None
    ) -> float | None:
        """See `Runner`. A thread cannot be stopped: it fails at its next request."""
        try:
            if inspect.iscoroutinefunction(self._function):
                found = await self._function(dict(task.shown), policy)
            else:
                found = await in_new_thread(lambda: self._function(dict(task.shown), policy), "agent")
                # A plain decorator around an async function hides that it is one.
                found = await found if inspect.isawaitable(found) else found
        except AgentFailed:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an agent may raise anything
            raise AgentFailed(f"{type(error).__name__}: {error}") from error
        return reward_of(found.get("reward") if isinstance(found, Mapping) else found, AgentFailed)


class CommandRunner:
    """Runs a command in the folder of its episode."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec, self.left = spec, LeftBehind()
        self._command = shlex.split(spec.agent)

    async def run(
        self, task: Task, policy: Policy, folder: Folder, log: OutputLog | None = None
    ) -> float | None:
        """See `Runner`."""
        await folder.make(TASK_FILE, task.shown)
        gateway, base_url, mounts = urlsplit(policy.base_url), policy.base_url, None
        if (sandbox := self._spec.sandbox) is not None:
            shown = () if policy.unix_socket is None else (policy.unix_socket,)
            mounts = sandbox.mounts(self._command, [folder.path], shown, gateway.netloc)
            if sandbox.offline:
                base_url = gateway._replace(netloc=f"127.0.0.1:{gateway.port}").geturl()
        reached = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": policy.api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": policy.api_key,
        }
        if policy.control_key is not None:
            reached["ASYNC_PIPELINE_CONTROL_KEY"] = policy.control_key
        if policy.unix_socket is not None:
            reached["ASYNC_PIPELINE_UNIX_SOCKET"] = policy.unix_socket
        reached["ASYNC_PIPELINE_TASK"] = str(folder.path / TASK_FILE)
        env = environment({**_home(folder), **self._spec.env, **reached})
        finished = await run_command(self._command, folder.path, env, log, self.left, mounts)
        if finished.status != 0:
            raise AgentFailed(finished.describe())
        return reward_of((finished.last_object() or {}).get("reward"), AgentFailed)


def _home(folder: Folder) -> dict[str, str]:
    return {"HOME": str(folder.path), "TMPDIR": str(folder.path)}


async def verified(
    spec: AgentSpec,
    folder: Folder,
    task: Task,
    log: OutputLog | None = None,
    left: LeftBehind | None = None,
) -> float:
    """Return the reward that the `verify` command prints, in the folder of an agent that has ended.

    Raises EnvironmentFailed if it prints none.
    """
    assert spec.verify is not None
    if folder.path == Path():
        await folder.make(TASK_FILE, task.shown)
    # Agents of other episodes, which may have the same task, must not find the ground truth in a file.
    in_memory = {"ASYNC_PIPELINE_TASK": json.dumps({**task.shown, **task.hidden}, ensure_ascii=False)}
    # What the agent has written must not decide what runs here.
    with Folder() as own:
        await own.make()
        env = environment({**NO_MODULES_OF_AGENTS, **_home(own), **spec.env})
        command = shlex.split(spec.verify)
        mounts = None if spec.sandbox is None else spec.sandbox.mounts(command, [folder.path, own.path])
        finished: Finished = await run_command(command, folder.path, env, log, left, mounts, in_memory)
    if finished.status != 0:
        raise EnvironmentFailed(f"verify: {finished.describe()}")
    reward = reward_of((finished.last_object() or {}).get("reward"), EnvironmentFailed)
    if reward is None:
        raise EnvironmentFailed(
            f'verify must print {{"reward": number}} as its last line, got {finished.stdout[-200:]!r}'
        )
    return reward


def reward_of(found: Any, error: type[Exception]) -> float | None:
    """Return a reward as a number, or None without one. Raises `error` if it is no finite number."""
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise error(f"the reward must be a finite number, got {found!r}"[:500])
    return float(found)
