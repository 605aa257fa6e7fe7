# SPDX-License-Identifier: Apache-2.0
"""An environment behaves alike wherever it runs, and a process leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from recipe.async_pipeline.agents import env_hosts
from recipe.async_pipeline.agents.env_hosts import HOSTS, EnvironmentHost, ProcessHost, ThreadHost
from recipe.async_pipeline.agents.environment import EnvironmentSpec, Isolation, Step
from recipe.async_pipeline.errors import EnvironmentFailed
from tests import REPOSITORY
from tests.fakes.descriptors import Descriptors
from tests.fakes.environments import AWAITING, COUNTING, Counting
from tests.fakes.waiting import until


def with_host(
    isolation: Isolation,
    story: Callable[[EnvironmentHost], Awaitable[None]],
    spec: EnvironmentSpec = COUNTING,
) -> bool:
    async def play() -> bool:
        host = HOSTS[isolation](spec)
        try:
            await story(host)
        finally:
            whole = await host.close()
        return whole

    return asyncio.run(play())


@pytest.mark.parametrize("spec", [COUNTING, AWAITING], ids=["functions", "coroutines"])
@pytest.mark.parametrize("isolation", HOSTS)
def test_it_plays_episodes_one_after_another(isolation: Isolation, spec: EnvironmentSpec) -> None:
    async def story(host: EnvironmentHost) -> None:
        assert await host.reset(7, {"hint": "go"}) == "seed 7 episode 1 go"
        assert await host.step("é\n") == Step("é\n 1", 0.5)
        with pytest.raises(EnvironmentFailed, match="step: RuntimeError: in a step"):
            await host.step("raise")
        with pytest.raises(EnvironmentFailed, match="step: SystemExit: 3"):
            await host.step("exit")
        with pytest.raises(EnvironmentFailed, match="step: CancelledError: by itself"):
            await host.step("cancel")
        with pytest.raises(EnvironmentFailed, match="must return a Step"):
            await host.step("nonsense")
        assert await host.reset(8, {}) == "seed 8 episode 2"
        assert await host.step("stop") == Step("stop 1", 0.5, over=True)

    assert with_host(isolation, story, spec)


@pytest.mark.parametrize("isolation", HOSTS)
def test_pictures_are_shown_as_they_were_drawn(isolation: Isolation) -> None:
    drawn = Counting(pictures=2)

    async def story(host: EnvironmentHost) -> None:
        assert await host.reset(7, {}) == drawn.reset(7)
        assert (await host.step("é")).observation == drawn.step("é").observation

    assert with_host(isolation, story, EnvironmentSpec(name=COUNTING.name, kwargs={"pictures": 2}))


@pytest.mark.parametrize("isolation", HOSTS)
def test_one_that_was_never_used_is_closed(isolation: Isolation) -> None:
    async def story(host: EnvironmentHost) -> None:
        pass

    assert with_host(isolation, story)


def guard_of(player: int) -> int:
    """Return the process that has started an environment's."""
    return int(psutil.Process(player).ppid())


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("started", ["fork", "daemon"])
def test_a_process_that_hangs_is_killed_with_what_it_started(started: str) -> None:
    pids: list[int] = []
    before = psutil.Process().children()

    async def story(host: EnvironmentHost) -> None:
        assert isinstance(host, ProcessHost)
        assert psutil.Process().children() == before, "it starts with the first episode"
        await host.reset(1, {})
        pids.extend(int(pid) for pid in (await host.step(started)).observation.split())
        pids.append(guard_of(pids[0]))
        hanging = asyncio.create_task(host.step("hang"))
        done, _ = await asyncio.wait({hanging}, timeout=0.1)
        assert not done and not any(is_gone(pid) for pid in pids)
        hanging.cancel()

    assert with_host("process", story)
    until(lambda: all(is_gone(pid) for pid in pids), "they end")


def test_a_process_that_dies_is_a_failure_and_leaves_nothing() -> None:
    pids: list[int] = []

    async def story(host: EnvironmentHost) -> None:
        await host.reset(1, {})
        pids.extend(int(pid) for pid in (await host.step("fork")).observation.split())
        with pytest.raises(EnvironmentFailed, match="step: the environment's process died"):
            await host.step("die")
        with pytest.raises(EnvironmentFailed):
            await host.step("a")

    assert with_host("process", story)
    until(lambda: all(is_gone(pid) for pid in pids), "they end")


OWNER = """
import asyncio
import psutil
from recipe.async_pipeline.agents.env_hosts import ProcessHost
from tests.fakes.descriptors import Descriptors
from tests.fakes.environments import COUNTING

async def play():
    host = ProcessHost(COUNTING)
    await host.reset(1, {})
    (guard,) = psutil.Process().children()
    print((await host.step("fork")).observation, guard.pid, flush=True)
    await host.step("hang")

asyncio.run(play())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_process_of_the_pool_is_killed(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=REPOSITORY, text=True
    ) as owner:
        assert owner.stdout is not None
        # The environment prints as well, into the same pipe.
        line = next(line for line in owner.stdout if line[0].isdigit())
        os.kill(owner.pid, number)
        until(lambda: all(is_gone(int(pid)) for pid in line.split()), "they end")


def test_the_player_does_not_outlive_its_guard() -> None:
    pids: list[int] = []

    async def story(host: EnvironmentHost) -> None:
        assert isinstance(host, ProcessHost)
        await host.reset(1, {})
        player, child = (await host.step("fork")).observation.split()
        pids.append(int(player))
        os.kill(int(child), signal.SIGKILL)  # outlives them both
        os.kill(guard_of(pids[0]), signal.SIGKILL)
        until(lambda: is_gone(pids[0]), "the kernel kills it")
        with pytest.raises(EnvironmentFailed):
            await host.step("a")

    with_host("process", story)
    until(lambda: all(is_gone(pid) for pid in pids), "they end")


async def test_a_process_whose_start_is_cancelled_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, release = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    descriptors = Descriptors(monkeypatch)
    busy = loop.run_in_executor(None, release.wait)
    host = ProcessHost(COUNTING)
    resetting = asyncio.create_task(host.reset(1, {}))
    await asyncio.sleep(0)
    resetting.cancel()
    await asyncio.wait({resetting})
    assert await host.close()
    release.set()
    await busy
    # The one thread begins it, undoes it, and only then runs what comes next.
    await loop.run_in_executor(None, lambda: None)
    assert descriptors.made and descriptors.still_open() == set()


def test_a_thread_that_hangs_is_left_behind_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_hosts, "CLOSE_S", 0.1)
    released = threading.Event()

    async def story(host: EnvironmentHost) -> None:
        assert isinstance(host, ThreadHost)
        await host.reset(1, {})
        monkeypatch.setattr(Counting, "step", lambda environment, text: released.wait())
        hanging = asyncio.create_task(host.step("hang"))
        done, _ = await asyncio.wait({hanging}, timeout=0.1)
        assert not done
        hanging.cancel()

    assert not with_host("thread", story)
    released.set()


def test_a_coroutine_that_hangs_inline_is_cancelled() -> None:
    async def story(host: EnvironmentHost) -> None:
        await host.reset(1, {})
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(host.step("hang"), 0.05)

    assert with_host("inline", story, AWAITING)
