# SPDX-License-Identifier: Apache-2.0
"""Virtual time, its deadlock detector, and the bounded wait."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recipe.async_pipeline.core.clock import LoopClock, VirtualTimeLoop, run_virtual, unless_broken, within
from recipe.async_pipeline.errors import WaitTimeout

counts_cancellations = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 does not count cancellations"
)


def now() -> float:
    return LoopClock().now()


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


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


# The bounded wait.


@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_within_returns_the_result(timeout_s: float | None) -> None:
    async def main() -> tuple[str, float]:
        return await within(asyncio.sleep(9, "ready"), timeout_s, owner="train", what="x"), now()

    assert run_virtual(main()) == ("ready", 9)


def test_within_takes_what_is_ready_even_without_time() -> None:
    async def main() -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.set_result("ready")
        return await within(future, 0, owner="train", what="x")

    assert run_virtual(main()) == "ready"


@given(work_s=st.floats(0, 100), timeout_s=st.floats(0, 100))
def test_within_ends_when_the_sooner_of_the_two_ends(work_s: float, timeout_s: float) -> None:
    assume(abs(work_s - timeout_s) > 1e-6)

    async def main() -> None:
        wait = within(asyncio.sleep(work_s), timeout_s, owner="train", what="x")
        if work_s < timeout_s:
            await wait
        else:
            with pytest.raises(WaitTimeout):
                await wait
        assert now() == min(work_s, timeout_s)

    run_virtual(main())


def test_an_expired_wait_says_who_waited_for_what_and_who_holds_it() -> None:
    async def main() -> None:
        await within(forever(), 2.5, owner="train", what="a lease", holder=lambda: f"held at {now():g}")

    with pytest.raises(WaitTimeout, match=r"^train waited 2\.5 s for a lease; held at 2\.5$"):
        run_virtual(main())


def test_an_expired_wait_without_holder_ends_with_what() -> None:
    with pytest.raises(WaitTimeout, match="^train waited 600 s for a lease$"):
        run_virtual(within(forever(), 600, owner="train", what="a lease"))


def test_the_awaitable_has_finished_before_the_wait_raises() -> None:
    async def slow_to_unwind() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(4)

    async def main() -> float:
        with pytest.raises(WaitTimeout):
            await within(slow_to_unwind(), 2, owner="train", what="x")
        return now()

    assert run_virtual(main()) == 6


def test_an_expired_wait_cancels_a_task_too() -> None:
    async def main() -> bool:
        task = asyncio.create_task(forever())
        with pytest.raises(WaitTimeout):
            await within(task, 2, owner="train", what="x")
        return task.cancelled()

    assert run_virtual(main())


@pytest.mark.parametrize("error", [TimeoutError("own"), WaitTimeout("own"), asyncio.TimeoutError("own")])
def test_an_error_of_the_awaitable_comes_through_unchanged(error: Exception) -> None:
    async def fails() -> None:
        await asyncio.sleep(1)
        raise error

    with pytest.raises(type(error)) as caught:
        run_virtual(within(fails(), 2, owner="train", what="x"))
    assert caught.value is error


def test_what_the_awaitable_does_when_cancelled_decides() -> None:
    async def finishes_nevertheless() -> str:
        try:
            await forever()
        except asyncio.CancelledError:
            return "finished"
        return "impossible"

    async def fails() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            raise TimeoutError("own") from None

    async def main() -> str:
        with pytest.raises(TimeoutError, match="^own$"):
            await within(fails(), 1, owner="train", what="x")
        return await within(finishes_nevertheless(), 1, owner="train", what="x")

    assert run_virtual(main()) == "finished"


@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_cancelling_the_caller_cancels_the_awaitable(timeout_s: float | None) -> None:
    async def main() -> tuple[bool, float]:
        inner: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = asyncio.create_task(within(inner, timeout_s, owner="train", what="x"))
        await asyncio.sleep(1)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        return inner.cancelled(), now()

    assert run_virtual(main()) == (True, 1)


@counts_cancellations
def test_a_cancellation_in_the_moment_of_expiry_wins() -> None:
    async def main() -> bool:
        waiter = asyncio.create_task(within(forever(), 2, owner="train", what="x"))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(2, waiter.cancel)
        await asyncio.wait([waiter])
        return waiter.cancelled()

    assert run_virtual(main())


@pytest.mark.parametrize(("outer_s", "inner_s", "owner"), [(1, 2, "outer"), (2, 1, "inner")])
def test_nested_waits_expire_each_on_its_own(outer_s: float, inner_s: float, owner: str) -> None:
    inner = within(forever(), inner_s, owner="inner", what="x")
    with pytest.raises(WaitTimeout, match=f"^{owner} waited 1 s"):
        run_virtual(within(inner, outer_s, owner="outer", what="x"))


@counts_cancellations
def test_of_nested_waits_that_expire_together_the_outer_one_raises() -> None:
    with pytest.raises(WaitTimeout, match="^outer"):
        run_virtual(within(within(forever(), 1, owner="inner", what="x"), 1, owner="outer", what="x"))


def test_after_a_wait_the_task_continues_undisturbed() -> None:
    async def main() -> tuple[float, int]:
        await within(asyncio.sleep(1), 2, owner="train", what="x")
        with pytest.raises(WaitTimeout):
            await within(forever(), 2, owner="train", what="x")
        await asyncio.sleep(10)
        task = asyncio.current_task()
        return now(), getattr(task, "cancelling", lambda: 0)()

    assert run_virtual(main()) == (13, 0)


def test_a_holder_that_fails_does_not_prolong_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    def holder() -> str:
        raise KeyError("cannot tell")

    async def main() -> None:
        await within(forever(), 2, owner="train", what="x", holder=holder)

    with pytest.raises(WaitTimeout, match="^train waited 2 s for x$"):
        run_virtual(main())
    assert "cannot tell" in caplog.text


def test_an_answer_that_comes_is_returned_while_its_producer_works() -> None:
    async def answer() -> int:
        await asyncio.sleep(3.0)
        return 7

    assert run_virtual(unless_broken(answer(), lambda: None)) == 7


def test_a_broken_producer_ends_the_wait() -> None:
    async def story() -> float:
        loop = asyncio.get_running_loop()
        never: asyncio.Future[None] = loop.create_future()
        with pytest.raises(RuntimeError, match="dead"):
            await unless_broken(
                never, lambda: RuntimeError("dead") if loop.time() >= 10.0 else None, poll_s=0.5
            )
        assert never.cancelled()
        return loop.time()

    assert run_virtual(story()) == 10.0


def test_what_is_cancelled_for_it_has_ended_before_the_error_comes() -> None:
    ended: list[bool] = []

    async def answer() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError, match="dead"):
        run_virtual(unless_broken(answer(), lambda: RuntimeError(f"dead {ended}")))
    assert ended == [True]

    async def story() -> None:
        waiting = asyncio.create_task(unless_broken(answer(), lambda: None))
        await asyncio.sleep(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == [True, True]

    run_virtual(story())


def test_an_error_of_the_answer_itself_comes_through() -> None:
    async def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_virtual(unless_broken(fails(), lambda: None))
