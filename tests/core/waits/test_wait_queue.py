# SPDX-License-Identifier: Apache-2.0
"""First come, first served, under every order of cancellation."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.core.waits.wait_queue import Broadcast, Turnstile

pytestmark = pytest.mark.virtual_time


class Permits:
    """Counts permits, and who took one, in order."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.took: list[str] = []
        self.gate = Turnstile(lambda: self.free)

    async def take(self, name: str) -> None:
        await self.gate.turn(name)
        assert self.free > 0, "passed without a permit"
        self.free -= 1
        self.took.append(name)

    def give(self, count: int = 1) -> None:
        self.free += count
        self.gate.wake()


async def settle() -> None:
    """Let everything run that can."""
    await asyncio.sleep(1)


def test_a_turn_that_is_free_does_not_suspend() -> None:
    permits = Permits(1)
    with pytest.raises(StopIteration):
        permits.take("a").send(None)
    assert permits.took == ["a"]


async def test_a_newcomer_overtakes_no_waiter_even_without_suspension() -> None:
    permits = Permits(0)
    early = asyncio.create_task(permits.take("early"))
    await settle()
    permits.give()
    late = permits.take("late")
    late.send(None)  # runs it in this very turn of the loop, before `early` can run
    late.close()
    await early
    permits.give()
    await permits.take("latest")
    assert permits.took == ["early", "latest"]


@pytest.mark.parametrize("granted_first", [True, False])
async def test_a_cancelled_waiter_passes_its_turn_on(granted_first: bool) -> None:
    permits = Permits(0)
    first, second = (asyncio.create_task(permits.take(name)) for name in ("first", "second"))
    await settle()
    if granted_first:
        permits.give()
        first.cancel()
    else:
        first.cancel()
        permits.give()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert permits.took == ["second"]


OPERATION = st.one_of(
    st.tuples(st.just("take"), st.just(0)),
    st.tuples(st.just("give"), st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("turn of the loop"), st.just(0)),
)


@given(st.lists(OPERATION, max_size=60))
def test_waiters_that_are_not_cancelled_pass_in_order_and_no_permit_is_lost(
    ops: list[tuple[str, int]],
) -> None:
    async def main() -> None:
        permits = Permits(0)
        given_out = 0
        tasks: dict[str, asyncio.Task[None]] = {}
        for op, number in ops:
            if op == "take":
                name = str(len(tasks))
                tasks[name] = asyncio.create_task(permits.take(name), name=name)
            elif op == "give":
                given_out += number
                permits.give(number)
            elif op == "cancel" and str(number) in tasks:
                tasks[str(number)].cancel()
            elif op == "turn of the loop":
                await asyncio.sleep(0)
        await settle()
        left = [name for name, task in tasks.items() if not task.cancelled()]
        assert permits.took == left[: len(permits.took)]
        assert len(permits.took) + permits.free == given_out
        assert len(permits.took) == min(len(left), given_out)
        assert permits.gate.names == tuple(left[len(permits.took) :])

    run_virtual(main())


async def test_news_wakes_all_who_wait_and_none_who_come_later() -> None:
    news, woken = Broadcast(), list[str]()

    async def wait(name: str) -> None:
        await news.wait()
        woken.append(name)

    tasks = [asyncio.create_task(wait(name)) for name in ("a", "b")]
    await settle()
    news.notify()
    tasks.append(asyncio.create_task(wait("late")))
    await settle()
    assert woken == ["a", "b"]
    news.notify()
    await asyncio.gather(*tasks)
    assert woken == ["a", "b", "late"]
