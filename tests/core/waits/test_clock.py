# SPDX-License-Identifier: Apache-2.0
"""Virtual time and its deadlock detector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.waits.clock import LoopClock, VirtualTimeLoop, run_virtual
from recipe.async_pipeline.errors import WaitTimeout
from tests.fakes.virtual_time import forever, now

# Virtual time.


def test_an_hour_passes_in_one_turn_of_the_loop() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return now()

    assert run_virtual(main()) == 3600


def test_timers_fire_in_order_of_time_then_of_creation() -> None:
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append((name, now()))

        await asyncio.gather(sleeper("late", 7), sleeper("early", 2), sleeper("late too", 7))
        return seen

    assert run_virtual(main()) == [("early", 2), ("late", 7), ("late too", 7)]


def test_an_attached_model_advances_before_each_jump_and_sets_timers_where_a_task_is_concerned() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        seen: list[tuple[str, float]] = []
        events = [(1.0, None), (2.0, loop.create_future()), (3.0, None), (9.0, None)]

        def advance(until: float) -> None:
            while events and events[0][0] <= until:
                at, concerned = events.pop(0)
                seen.append(("event", at))
                if concerned is not None:
                    loop.call_at(at, concerned.set_result, None)
                    return

        waited = events[1][1]
        assert waited is not None
        loop.attach(advance)
        await waited
        seen.append(("task", now()))
        await asyncio.sleep(4.0)
        seen.append(("task", now()))
        return seen

    assert run_virtual(main()) == [
        ("event", 1.0),
        ("event", 2.0),
        ("task", 2.0),
        ("event", 3.0),
        ("task", 6.0),
    ]


def test_what_is_attached_may_end_a_wait_without_a_timer() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        future: asyncio.Future[None] = loop.create_future()
        untils: list[float] = []

        def advance(until: float) -> None:
            untils.append(until)
            if not future.done():
                loop.call_at(5.0, future.set_result, None)

        loop.attach(advance)
        await future
        return untils[0]

    assert run_virtual(main()) == float("inf")


def test_time_stands_still_while_anything_is_ready() -> None:
    async def main() -> tuple[float, float]:
        timer = asyncio.create_task(asyncio.sleep(1))
        for _ in range(1000):
            await asyncio.sleep(0)
        before = now()
        await timer
        return before, now()

    assert run_virtual(main()) == (0, 1)


def test_a_cancelled_timer_does_not_move_time() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(5, lambda: None).cancel()
        await asyncio.sleep(8)
        return now()

    assert run_virtual(main()) == 8


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=20))
def test_each_sleep_ends_exactly_when_it_is_due(delays_s: list[float]) -> None:
    async def main() -> None:
        for delay_s in delays_s:
            due = now() + delay_s
            await asyncio.sleep(delay_s)
            assert now() == due

    run_virtual(main())


def test_a_time_beyond_the_resolution_of_floats_does_not_spin() -> None:
    class Counting(VirtualTimeLoop):
        calls = 0

        def time(self) -> float:
            self.calls += 1
            assert self.calls < 1000, "the loop spins"
            return super().time()

    async def main() -> None:
        await asyncio.sleep(1e12)
        await asyncio.sleep(0.001)

    loop = Counting()
    loop.run_until_complete(main())
    assert loop.time() == 1e12 + 0.001
    loop.close()


def test_a_deadlock_names_every_task_that_waits() -> None:
    async def main() -> None:
        other = asyncio.create_task(forever(), name="generate")
        current = asyncio.current_task()
        assert current is not None
        current.set_name("train")
        await other

    with pytest.raises(WaitTimeout, match="every task waits and no timer is set: generate, train$"):
        run_virtual(main())


def test_cancelled_timers_do_not_hide_a_deadlock() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(5, lambda: None).cancel()
        await forever()

    with pytest.raises(WaitTimeout, match="no timer is set"):
        run_virtual(main())


def test_after_a_deadlock_every_task_is_unwound() -> None:
    unwound: list[str] = []

    async def waits(name: str) -> None:
        try:
            await forever()
        finally:
            unwound.append(name)

    async def main() -> None:
        await asyncio.gather(waits("a"), waits("b"))

    with pytest.raises(WaitTimeout):
        run_virtual(main())
    assert sorted(unwound) == ["a", "b"]


def test_threads_are_refused_rather_than_mistaken_for_a_deadlock() -> None:
    with pytest.raises(NotImplementedError, match="no threads"):
        run_virtual(asyncio.to_thread(int))


def test_run_virtual_raises_what_the_coroutine_raises() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("own error")

    with pytest.raises(KeyError, match="own error"):
        run_virtual(main())


def test_run_virtual_cancels_and_awaits_what_is_left_behind_and_closes_the_loop() -> None:
    events: list[str] = []

    async def left_behind() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)
            events.append(f"unwound at {now():g}")

    async def generator() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            events.append("generator closed")

    numbers = generator()

    async def main() -> asyncio.AbstractEventLoop:
        task = asyncio.create_task(left_behind())
        await asyncio.sleep(5)
        assert not task.done()
        assert await numbers.__anext__() == 1
        return asyncio.get_running_loop()

    assert run_virtual(main()).is_closed()
    assert events == ["unwound at 6", "generator closed"]


def test_a_task_left_behind_that_fails_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def left_behind() -> None:
        try:
            await forever()
        finally:
            raise KeyError("while unwinding")

    async def main() -> str:
        asyncio.get_running_loop().call_soon(lambda: None)
        task = asyncio.create_task(left_behind())
        await asyncio.sleep(1)
        return task.get_name()

    assert run_virtual(main())
    assert "failed while it was cancelled" in caplog.text
    assert "while unwinding" in caplog.text


def test_loop_clock_shows_the_time_of_the_loop_that_runs() -> None:
    async def main() -> bool:
        before = asyncio.get_running_loop().time()
        return before <= LoopClock().now() <= asyncio.get_running_loop().time()

    assert asyncio.run(main())
    assert run_virtual(main())
    with pytest.raises(RuntimeError, match="no running event loop"):
        LoopClock().now()
