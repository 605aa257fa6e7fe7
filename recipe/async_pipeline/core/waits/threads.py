# SPDX-License-Identifier: Apache-2.0
"""Calls that may block or hang, in a thread, awaited in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_new_thread(call: Callable[[], T], name: str) -> T:
    """Return what `call` returns in a new thread, which does not keep the process from ending.

    A thread that hangs is left behind when the caller is cancelled. Unlike a thread of an executor, it holds
    up nothing else. Raises what `call` raises, SystemExit too.
    """
    context = contextvars.copy_context()

    def start(run: Callable[[], None]) -> None:
        threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()

    return await in_thread_of(start, call)


def awaited_here(found: Any) -> Any:
    """Return the result of a call in a thread or process without an event loop, which may be a coroutine:
    a plain decorator around an async function hides that it is one.
    """

    async def result() -> Any:
        return await found

    return asyncio.run(result()) if inspect.isawaitable(found) else found


async def made_in_executor(make: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Return what `make` returns in a thread of the event loop's executor.

    A thread cannot be stopped: if the caller is cancelled meanwhile, `undo` gets what was made, in the
    executor too, also while the event loop ends. Raises what `make` raises.
    """
    loop, lock = asyncio.get_running_loop(), threading.Lock()
    made: list[T] = []
    given_up = False

    def run() -> T:
        found = make()
        with lock:
            made.append(found)
            undoing = given_up
        if undoing:
            undo(found)
        return found

    try:
        return await asyncio.shield(loop.run_in_executor(None, run))
    except asyncio.CancelledError:
        with lock:
            given_up, finished = True, list(made)
        for found in finished:
            loop.run_in_executor(None, undo, found)
        raise


async def in_thread_of(start: Callable[[Callable[[], None]], object], call: Callable[[], T]) -> T:
    """Return what `call` returns in the thread where `start` makes a function run.

    Raises what `call` raises, and RuntimeError in place of a StopIteration, which no future can hold.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(returned: list[T], raised: BaseException | None) -> None:
        if result.cancelled():
            return
        if raised is not None:
            result.set_exception(raised)
        else:
            result.set_result(returned[0])

    def run() -> None:
        returned, raised = [], None
        try:
            returned.append(call())
        except BaseException as error:  # noqa: BLE001 - exit() must reach the caller instead of the thread's end
            raised = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, returned, raised)

    start(run)
    return await result
