# SPDX-License-Identifier: Apache-2.0
"""An episode is offered to runners outside of the run, and its reward is what they report."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.agents.processes.sandbox import Folder
from recipe.async_pipeline.agents.runners import Policy, Task
from recipe.async_pipeline.errors import AgentFailed, RequestRefused
from recipe.async_pipeline.gateway.claims import Claims
from recipe.async_pipeline.gateway.client import ClaimedTask
from tests import HANG_S

pytestmark = pytest.mark.real_engine
TASK, POLICY = Task({"messages": [], "seed": 3, "task": {}}, {}), Policy("http://x/v1", "k")


def with_runner(module: ModuleType, runs: Callable[[Any, Claims, str], Coroutine[Any, Any, None]]) -> None:
    async def test() -> None:
        claims = Claims(60)
        running = asyncio.create_task(module.ExternalRunner(claims).run(TASK, POLICY, Folder()))
        found = await claims.claim(HANG_S)
        assert found is not None
        assert found.task == {**TASK.shown, "base_url": "http://x/v1", "api_key": "k"}
        await runs(running, claims, found.lease)

    asyncio.run(asyncio.wait_for(test(), HANG_S))


def test_the_reward_is_what_the_runner_reports(module: ModuleType) -> None:
    async def runs(running: Any, claims: Claims, lease: str) -> None:
        claims.finish(lease, 0.5)
        assert await running == 0.5

    with_runner(module, runs)


async def test_a_runner_that_may_set_the_reward_gets_the_control_key(module: ModuleType) -> None:
    claims = Claims(60)
    running = asyncio.create_task(
        module.ExternalRunner(claims).run(TASK, POLICY._replace(control_key="c"), Folder())
    )
    found = await claims.claim(HANG_S)
    assert found is not None
    task = ClaimedTask("http://x", json.loads(json.dumps(found._asdict())))
    assert (task.control_key, task.api_key, task.shown) == ("c", "k", TASK.shown)
    claims.finish(found.lease, None)
    assert await running is None


def test_a_runner_that_fails_is_an_agent_that_failed(module: ModuleType) -> None:
    async def runs(running: Any, claims: Claims, lease: str) -> None:
        claims.fail(lease, "no sandbox")
        with pytest.raises(AgentFailed, match="its runner reports: no sandbox"):
            await running

    with_runner(module, runs)


def test_an_episode_that_is_given_up_ends_the_lease(module: ModuleType) -> None:
    async def runs(running: Any, claims: Claims, lease: str) -> None:
        running.cancel()
        await asyncio.wait({running})
        with pytest.raises(RequestRefused, match="the lease has ended"):
            claims.renew(lease)

    with_runner(module, runs)


def test_the_address_is_readable_for_its_owner_only(module: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "runners"
    address = module.AddressFile(str(folder))
    for url in ("http://a", "http://b"):
        asyncio.run(address.write(url, "secret"))
        (file,) = folder.iterdir()
        assert json.loads(file.read_text()) == {"url": url, "key": "secret"}
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for _ in range(2):
        address.remove()
    assert list(folder.iterdir()) == []


def test_an_address_that_a_killed_run_left_is_removed(module: ModuleType, tmp_path: Path) -> None:
    ended, here = subprocess.Popen(["true"]), socket.gethostname()
    ended.wait()
    other = f"gateway-{here}-1-99999999"
    for name in (f"gateway-{here}-{ended.pid}", f"gateway-{here}-1", "gateway-elsewhere-99999999", other):
        (tmp_path / f"{name}.json").touch()
    asyncio.run(module.AddressFile(str(tmp_path)).write("http://a", "secret"))
    assert {file.name for file in tmp_path.iterdir()} == {
        f"gateway-{here}-{os.getpid()}.json",
        f"gateway-{here}-1.json",
        "gateway-elsewhere-99999999.json",
        f"gateway-{here}-1-99999999.json",
    }
