# SPDX-License-Identifier: Apache-2.0
"""Work of a stage that continues while the stage takes its next item, and cancellations on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ...errors import StrayCancellation


@contextmanager
def no_stray_cancellation(who: Callable[[], str], stopping: Callable[[], bool]) -> Iterator[None]:
    """Raise StrayCancellation for a CancelledError that leaves the block while nothing is `stopping`.

    asyncio takes a task that raises CancelledError for one that was cancelled on purpose: no `wait` returns
    for it, and the rest of the run would wait for the stage until a deadline passes.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if stopping():
            raise
        raise StrayCancellation(
            f"{who()} raised CancelledError, but the run is not being stopped; its code must handle the "
            "cancellation of each task or scope that it awaits"
        ) from error


T = TypeVar("T")


class BackgroundWork:
    """The background tasks of a run. An error of one ends the run at once."""

    def __init__(self, fail: Callable[[str, Exception], object], stopping: Callable[[], bool]) -> None:
        """`fail(stage, error)` ends the run, unless the stage has reported that error as its own."""
        self._fail, self._stopping = fail, stopping
        self.tasks: set[asyncio.Task[Any]] = set()
        """Tasks that have not ended; the run cancels and awaits them when it stops."""

    def start(self, role: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work of a stage. The stage must await it before it ends."""
        name = f"{role} in background"

        async def guarded() -> T:
            with no_stray_cancellation(lambda: name, self._stopping):
                return await work

        task = asyncio.create_task(guarded(), name=name)
        self.tasks.add(task)
        task.add_done_callback(lambda done: self._ended(role, done))
        # A task that is cancelled before it begins never awaits its work.
        task.add_done_callback(lambda done: work.close())
        return task

    def _ended(self, role: str, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(role, error)
