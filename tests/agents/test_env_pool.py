# SPDX-License-Identifier: Apache-2.0
"""The pool: bounds, deadlines, which environments play again, and random schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.agents.env_hosts import EnvironmentPool, PoolLimits
from recipe.async_pipeline.agents.environment import Step
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import EnvironmentFailed
from tests.fakes.environments import COUNTING

pytestmark = pytest.mark.virtual_time


class FakeHost:
    """Takes the seconds that a task or text names; `fail` raises. `made` has all hosts."""

    made: list[FakeHost]
    playing = most_playing = open_ = most_open = 0

    def __init__(self, spec: object) -> None:
        type(self).open_ += 1
        type(self).most_open = max(self.most_open, self.open_)
        self.made.append(self)
        self.log: list[str] = []
        self.closed = False

    async def reset(self, seed: int, task: Mapping[str, Any]) -> str:
        assert not self.closed
        self.log.append(f"reset {seed}")
        await asyncio.sleep(task.get("seconds", 0))
        if task.get("fail"):
            raise EnvironmentFailed("reset: no")
        return f"seed {seed}"

    async def step(self, text: str) -> Step:
        assert not self.closed
        self.log.append(text)
        if text == "fail":
            raise EnvironmentFailed("step: no")
        await asyncio.sleep(float(text))
        return Step(text)

    async def close(self) -> bool:
        assert not self.closed
        self.closed = True
        type(self).open_ -= 1
        return "left" not in self.log


def pool_of(**limits: Any) -> tuple[EnvironmentPool, type[FakeHost]]:
    kind = type("Host", (FakeHost,), {"made": []})
    return EnvironmentPool(COUNTING, PoolLimits(**limits), {PoolLimits().isolation: kind}), kind


async def test_an_environment_plays_one_episode_after_another() -> None:
    pool, kind = pool_of()
    for seed in (1, 2):
        async with pool.episode(seed, {}) as game:
            assert game.observation == f"seed {seed}"
            assert await game.step("1") == Step("1")
    (host,) = kind.made
    assert host.log == ["reset 1", "1", "reset 2", "1"] and not host.closed
    await pool.close()
    assert host.closed and pool.left_behind == 0


@pytest.mark.parametrize("text", ["fail", "100"], ids=["fails", "takes too long"])
async def test_one_that_failed_is_ended_and_replaced(text: str) -> None:
    pool, kind = pool_of(timeout_s=10)
    with pytest.raises(EnvironmentFailed, match="step: no|step took more than 10 s"):
        async with pool.episode(1, {}) as game:
            await game.step(text)
    async with pool.episode(2, {}) as game:
        await game.step("1")
    await pool.close()
    assert [host.log for host in kind.made] == [["reset 1", text], ["reset 2", "1"]]
    assert all(host.closed for host in kind.made)


@pytest.mark.parametrize("task", [{"fail": True}, {"seconds": 100}], ids=["fails", "takes too long"])
async def test_a_reset_that_fails_is_the_same(task: dict[str, Any]) -> None:
    pool, kind = pool_of(timeout_s=10)
    with pytest.raises(EnvironmentFailed, match="reset: no|reset took more than 10 s"):
        async with pool.episode(1, task):
            raise AssertionError("it was not reset")
    await pool.close()
    assert [host.closed for host in kind.made] == [True]


async def test_an_error_of_the_agent_is_no_fault_of_the_environment() -> None:
    pool, kind = pool_of()
    with pytest.raises(KeyError):
        async with pool.episode(1, {}):
            raise KeyError
    assert [host.closed for host in kind.made] == [False]
    await pool.close()


async def test_one_that_could_not_be_ended_is_counted() -> None:
    pool, kind = pool_of()
    async with pool.episode(1, {}):
        kind.made[0].log.append("left")
    await pool.close()
    assert pool.left_behind == 1
    assert [pool.newly_left(), pool.newly_left()] == [1, 0], "told once"


EPISODE = st.tuples(
    st.sampled_from([{}, {"seconds": 3}, {"seconds": 30}, {"fail": True}]),
    st.lists(st.sampled_from(["1", "4", "30", "fail"]), max_size=3),
    st.none() | st.integers(0, 12),
)


@settings(max_examples=25)
@given(st.lists(EPISODE, max_size=12), st.integers(1, 3))
def test_whatever_happens_nothing_leaks(
    episodes: list[tuple[dict[str, Any], list[str], int | None]], concurrency: int
) -> None:
    async def story() -> None:
        pool, kind = pool_of(concurrency=concurrency, timeout_s=10)

        async def play(seed: int, task: dict[str, Any], texts: list[str]) -> None:
            with suppress(EnvironmentFailed):
                async with pool.episode(seed, task) as game:
                    kind.playing += 1
                    kind.most_playing = max(kind.most_playing, kind.playing)
                    try:
                        for text in texts:
                            await game.step(text)
                    finally:
                        kind.playing -= 1

        tasks = []
        for seed, (task, texts, cancel_at) in enumerate(episodes):
            tasks.append(asyncio.create_task(play(seed, task, texts)))
            if cancel_at is not None:
                asyncio.get_running_loop().call_later(cancel_at, tasks[-1].cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.close()
        assert kind.open_ == 0 and all(host.closed for host in kind.made)
        assert kind.most_playing <= concurrency
        # One that is ended may still be closing while its successor begins.
        failed = sum(texts[-1:] == ["fail"] or "fail" in task for task, texts, _ in episodes)
        assert len(kind.made) <= max(1, len(episodes)) and kind.most_open <= concurrency + failed + sum(
            cancel is not None or "30" in texts or task.get("seconds") == 30
            for task, texts, cancel in episodes
        )

    run_virtual(story())
