# SPDX-License-Identifier: Apache-2.0
"""A wait ends by its result, its error, its deadline or its cancellation, whichever comes first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.core.waits.deadline import ABANDONED, EXPIRED, all_of, unless_broken, within
from recipe.async_pipeline.errors import WaitTimeout
from tests.fakes.virtual_time import counts_cancellations, forever, now

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("timeout_s", [None, 10.0])
async def test_within_returns_the_result(timeout_s: float | None) -> None:
    assert (await within(asyncio.sleep(9, "ready"), timeout_s, owner="train", what="x"), now()) == (
        "ready",
        9,
    )


async def test_within_takes_what_is_ready_even_without_time() -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    future.set_result("ready")
    assert await within(future, 0, owner="train", what="x") == "ready"


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


async def test_an_expired_wait_says_who_waited_for_what_and_who_holds_it() -> None:
    with pytest.raises(WaitTimeout, match=r"^train waited 2\.5 s for a lease; held at 2\.5$"):
        await within(forever(), 2.5, owner="train", what="a lease", holder=lambda: f"held at {now():g}")


def test_an_expired_wait_without_holder_ends_with_what() -> None:
    with pytest.raises(WaitTimeout, match="^train waited 600 s for a lease$"):
        run_virtual(within(forever(), 600, owner="train", what="a lease"))


async def test_the_awaitable_has_finished_before_the_wait_raises() -> None:
    async def slow_to_unwind() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(4)

    with pytest.raises(WaitTimeout):
        await within(slow_to_unwind(), 2, owner="train", what="x")
    assert now() == 6


async def test_the_awaitable_learns_that_the_deadline_has_passed() -> None:
    found: list[tuple[Any, ...]] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            found.append(error.args)
            raise

    with pytest.raises(WaitTimeout):
        await within(work(), 1, owner="a", what="b")
    assert found[0] == (EXPIRED,)


async def test_an_expired_wait_cancels_a_task_too() -> None:
    task = asyncio.create_task(forever())
    with pytest.raises(WaitTimeout):
        await within(task, 2, owner="train", what="x")
    assert task.cancelled()


@pytest.mark.parametrize("error", [TimeoutError("own"), WaitTimeout("own"), asyncio.TimeoutError("own")])
def test_an_error_of_the_awaitable_comes_through_unchanged(error: Exception) -> None:
    async def fails() -> None:
        await asyncio.sleep(1)
        raise error

    with pytest.raises(type(error)) as caught:
        run_virtual(within(fails(), 2, owner="train", what="x"))
    assert caught.value is error


async def test_what_the_awaitable_does_when_cancelled_decides() -> None:
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

    with pytest.raises(TimeoutError, match="^own$"):
        await within(fails(), 1, owner="train", what="x")
    assert await within(finishes_nevertheless(), 1, owner="train", what="x") == "finished"


async def swallows_cancellation() -> None:
    try:
        await forever()
    except asyncio.CancelledError:
        await forever()


async def test_what_swallows_its_cancellation_is_left_running(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WaitTimeout, match=f"^train waited 2 s for a tool; {ABANDONED}$") as caught:
        await within(swallows_cancellation(), 2, owner="train", what="a tool", grace_s=3)
    assert caught.value.abandoned
    assert now() == 5
    assert "train waits no longer for a tool, which ignores its cancellation" in caplog.text


async def test_a_cancelled_caller_leaves_behind_what_swallows_its_cancellation() -> None:
    waiter = asyncio.create_task(within(swallows_cancellation(), 60, owner="train", what="a tool", grace_s=3))
    await asyncio.sleep(1)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert now() == 4


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), ValueError("own"), TimeoutError("own")]
)
async def test_with_grace_an_error_comes_through_unchanged(error: BaseException) -> None:
    async def fails() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await within(fails(), 2, owner="train", what="x", grace_s=1)
    assert caught.value is error


async def test_with_grace_the_awaitable_learns_of_the_deadline_and_ends_first() -> None:
    found: list[Any] = []

    async def slow_to_unwind() -> None:
        try:
            await forever()
        except asyncio.CancelledError as error:
            found.append(error.args)
            await asyncio.sleep(4)
            raise

    with pytest.raises(WaitTimeout) as caught:
        await within(slow_to_unwind(), 2, owner="train", what="x", grace_s=5)
    assert not caught.value.abandoned
    assert now() == 6
    assert found == [(EXPIRED,)]


@pytest.mark.parametrize("timeout_s", [None, 10.0])
async def test_cancelling_the_caller_cancels_the_awaitable(timeout_s: float | None) -> None:
    inner: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiter = asyncio.create_task(within(inner, timeout_s, owner="train", what="x"))
    await asyncio.sleep(1)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (inner.cancelled(), now()) == (True, 1)


@counts_cancellations
async def test_a_cancellation_in_the_moment_of_expiry_wins() -> None:
    waiter = asyncio.create_task(within(forever(), 2, owner="train", what="x"))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_at(2, waiter.cancel)
    await asyncio.wait([waiter])
    assert waiter.cancelled()


@pytest.mark.parametrize(("outer_s", "inner_s", "owner"), [(1, 2, "outer"), (2, 1, "inner")])
def test_nested_waits_expire_each_on_its_own(outer_s: float, inner_s: float, owner: str) -> None:
    inner = within(forever(), inner_s, owner="inner", what="x")
    with pytest.raises(WaitTimeout, match=f"^{owner} waited 1 s"):
        run_virtual(within(inner, outer_s, owner="outer", what="x"))


@counts_cancellations
def test_of_nested_waits_that_expire_together_the_outer_one_raises() -> None:
    with pytest.raises(WaitTimeout, match="^outer"):
        run_virtual(within(within(forever(), 1, owner="inner", what="x"), 1, owner="outer", what="x"))


async def test_after_a_wait_the_task_continues_undisturbed() -> None:
    await within(asyncio.sleep(1), 2, owner="train", what="x")
    with pytest.raises(WaitTimeout):
        await within(forever(), 2, owner="train", what="x")
    await asyncio.sleep(10)
    task = asyncio.current_task()
    assert (now(), getattr(task, "cancelling", lambda: 0)()) == (13, 0)


async def test_a_holder_that_fails_does_not_prolong_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    def holder() -> str:
        raise KeyError("cannot tell")

    with pytest.raises(WaitTimeout, match="^train waited 2 s for x$"):
        await within(forever(), 2, owner="train", what="x", holder=holder)
    assert "cannot tell" in caplog.text


def test_an_answer_that_comes_is_returned_while_its_producer_works() -> None:
    async def answer() -> int:
        await asyncio.sleep(3.0)
        return 7

    assert run_virtual(unless_broken(answer(), lambda: None)) == 7


async def test_a_broken_producer_ends_the_wait() -> None:
    loop = asyncio.get_running_loop()
    never: asyncio.Future[None] = loop.create_future()
    with pytest.raises(RuntimeError, match="dead"):
        await unless_broken(never, lambda: RuntimeError("dead") if loop.time() >= 10.0 else None, poll_s=0.5)
    assert never.cancelled()
    assert loop.time() == 10.0


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


# Several coroutines.


async def test_all_of_returns_when_all_have() -> None:
    await all_of(asyncio.sleep(1), asyncio.sleep(3))
    assert now() == 3


async def test_all_of_raises_the_first_error_after_the_others_have_ended() -> None:
    ended: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(1)
        raise ConnectionError("gone")

    async def lingers() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(2)
            ended.append("lingers")

    with pytest.raises(ConnectionError, match="gone"):
        await all_of(lingers(), fails())
    assert (now(), ended) == (3, ["lingers"])
