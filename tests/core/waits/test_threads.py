# SPDX-License-Identifier: Apache-2.0
"""A call in a thread: what it returns, raises, and leaves behind."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any, NoReturn

import pytest

from recipe.async_pipeline.core.waits.threads import in_new_thread, in_thread_of, made_in_executor
from tests import HANG_S

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME")


async def test_it_runs_in_a_daemon_with_the_name_and_the_context_of_the_caller() -> None:
    def call() -> tuple[str, bool, str]:
        thread = threading.current_thread()
        return thread.name, thread.daemon, NAME.get()

    NAME.set("caller")
    assert await in_new_thread(call, "tool t") == ("tool t", True, "caller")


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("bad"), "ValueError('bad')"),
        (SystemExit(3), "SystemExit(3)"),
        (StopIteration(), "RuntimeError('StopIteration()')"),
    ],
)
async def test_what_it_raises_reaches_the_caller(raised: BaseException, seen: str) -> None:
    def call() -> NoReturn:
        raise raised

    with pytest.raises((Exception, SystemExit)) as error:
        await in_new_thread(call, "t")
    assert repr(error.value) == seen


async def test_one_that_outlasts_its_caller_and_the_loop_ends_in_silence(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result goes nowhere: the caller was cancelled, and then the loop was closed."""
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    release, threads = threading.Event(), []

    loop, began = asyncio.get_running_loop(), asyncio.Event()

    def call() -> None:
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(began.set)
        assert release.wait(HANG_S)

    waiting = asyncio.ensure_future(in_new_thread(call, "t"))
    await began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    threads[0].join(HANG_S)
    assert not threads[0].is_alive() and not failures and not recwarn.list


def test_a_result_for_a_cancelled_caller_is_dropped_while_the_loop_runs() -> None:
    calls: list[Any] = []

    async def test() -> None:
        waiting = asyncio.ensure_future(in_thread_of(calls.append, lambda: 1))
        await asyncio.sleep(0)
        waiting.cancel()
        calls[0]()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(test(), debug=True)


class Making:
    """Makes something, which ends when it may."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        self.release.wait()
        return "made"


async def test_what_is_made_for_a_cancelled_caller_is_undone() -> None:
    make = Making()

    loop = asyncio.get_running_loop()
    undone: asyncio.Future[str] = loop.create_future()
    making = asyncio.create_task(
        made_in_executor(make, lambda made: loop.call_soon_threadsafe(undone.set_result, made))
    )
    await loop.run_in_executor(None, make.begun.wait)
    making.cancel()
    await asyncio.wait({making})
    assert making.cancelled() and not undone.done()
    make.release.set()
    assert await undone == "made"


def test_what_is_made_while_the_loop_ends_is_undone() -> None:
    make, undone = Making(), list[str]()

    async def test() -> None:
        loop = asyncio.get_running_loop()
        asyncio.create_task(made_in_executor(make, undone.append))  # noqa: RUF006 - left to the end of the loop
        await loop.run_in_executor(None, make.begun.wait)
        # The loop cancels its tasks, and then waits for the threads of its executor.
        threading.Timer(0.2, make.release.set).start()

    asyncio.run(test())
    assert undone == ["made"]


async def test_what_is_made_in_an_executor_is_returned_or_raised() -> None:
    def fails() -> NoReturn:
        raise ValueError("bad")

    undone: list[str] = []
    assert await made_in_executor(lambda: "made", undone.append) == "made"
    with pytest.raises(ValueError, match="bad"):
        await made_in_executor(fails, undone.append)
    assert undone == []
