# SPDX-License-Identifier: Apache-2.0
"""Run verl's blocking code in threads, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ...core.waits.deadline import within

T = TypeVar("T")
CALL_THREADS = 16
"""Maximum number of concurrent blocking calls: one per stage, one of validation, one of the step report,
three of a checkpoint.
"""


class BlockingCalls:
    """Runs calls in the threads of a run, with a deadline if the event loop waits for them."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="verl-call")

    async def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function` in a thread and return its result.

        Raises WaitTimeout if it does not return in time, which abandons its thread; else its error.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        called = loop.run_in_executor(self._threads, partial(function, *args, **kwargs))
        name = getattr(function, "__name__", type(function).__name__)
        return await within(called, self.timeout_s, owner=task.get_name(), what=f"the call {name} to return")

    async def without_deadline(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` in a thread and return its result. The caller bounds the wait."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args))

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Start a call that nothing on the event loop waits for."""
        return self._threads.submit(function, *args)

    def close(self) -> None:
        """Start no more calls. Does not wait for running calls: a thread may be stuck."""
        self._threads.shutdown(wait=False, cancel_futures=True)
