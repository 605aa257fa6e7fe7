# SPDX-License-Identifier: Apache-2.0
"""Waits with a deadline: the error names who waited, for what, and who holds it up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from ...errors import WaitTimeout
from .wait_graph import Wait, waits_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
EXPIRED = "deadline"
"""The message of a cancellation by a deadline."""
ABANDONED = "it ignores its cancellation and is left running"
GRACE_S = 2.0
"""Seconds that the code of users gets to end after its cancellation."""


async def within(
    awaitable: Awaitable[T],
    timeout_s: float | None,
    *,
    owner: str,
    what: str,
    holder: Callable[[], str] | None = None,
    excused_s: Callable[[], float] | None = None,
    grace_s: float | None = None,
) -> T:
    """Await something for at most `timeout_s` seconds (None: no deadline) and return its result.

    The awaitable runs in the caller's own task, so a cancellation reaches it at once and a result is
    never lost between two tasks. On expiry it is cancelled, and it has finished before the error is
    raised; if it completes nevertheless, the caller gets its result or its own error. `holder` describes
    what holds up the wait; it is called on the loop at the moment of expiry. `excused_s` counts seconds, from
    any moment on, that the deadline does not include.

    `grace_s` is for the code of users, which may swallow its cancellation: it runs in a separate task, with a
    copy of the caller's context, and is left running if it has not ended so many seconds after it was
    cancelled, by the deadline or by the caller. The error then says so, and the log counts it.

    Raises WaitTimeout if the deadline passes, and CancelledError if the caller is cancelled. Anything
    that the awaitable raises is passed on unchanged, including a TimeoutError.
    """
    loop = asyncio.get_running_loop()
    wait = Wait(owner=owner, what=what, since=loop.time(), timeout_s=timeout_s, holder=holder)
    with waits_of(loop).noted(wait):
        if timeout_s is None:
            return await awaitable
        deadline = _Deadline(wait, excused_s)
        if grace_s is not None:
            awaitable = _ending_within(awaitable, grace_s, wait)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if not deadline.expired or deadline.cancelled_from_outside():
                raise
            ignored = f"; {ABANDONED}" if wait.abandoned else ""
            raise WaitTimeout(f"{deadline.why}{deadline.held_by}{ignored}", wait.abandoned) from None
        finally:
            deadline.settle()


async def unless_broken(
    awaitable: Awaitable[T], broken: Callable[[], BaseException | None], poll_s: float = 0.5
) -> T:
    """Await a result, unless its producer breaks.

    `broken` returns the error to raise, or None while the producer works. It is called every `poll_s`
    seconds. Errors of the awaitable are passed on. If this function ends early, the awaitable is
    cancelled and has ended by then.
    """
    bringing = asyncio.ensure_future(awaitable)
    try:
        while not bringing.done():
            await asyncio.wait({bringing}, timeout=poll_s)
            if not bringing.done() and (error := broken()) is not None:
                raise error
        return bringing.result()
    finally:
        if not bringing.done():
            bringing.cancel()
            await asyncio.wait({bringing})


async def all_of(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Run coroutines together until all have returned.

    Raises the first error of any of them. If this function ends early, the others have been cancelled and
    have ended by then.
    """
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_abandoned: set[asyncio.Future[Any]] = set()
"""What ignored its cancellation and still runs. The event loop itself holds tasks weakly."""


async def _ending_within(awaitable: Awaitable[T], grace_s: float, wait: Wait) -> T:
    """Await something in a separate task, which is abandoned `grace_s` seconds after a cancellation."""

    async def settled() -> tuple[list[T], BaseException | None]:
        try:
            return [await awaitable], None
        except (SystemExit, KeyboardInterrupt) as error:
            # A task that raises one of them ends the event loop.
            return [], error

    task = asyncio.ensure_future(settled())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError as error:
        task.cancel(*error.args)
        try:
            await asyncio.wait({task}, timeout=grace_s)
        finally:
            if not task.done():
                _abandon(task, wait)
        if wait.abandoned:
            raise
    found, exits = task.result()
    if exits is not None:
        raise exits
    return found[0]


def _abandon(task: asyncio.Future[Any], wait: Wait) -> None:
    wait.abandoned = True
    _abandoned.add(task)

    def forget(ended: asyncio.Future[Any]) -> None:
        _abandoned.discard(ended)
        if not ended.cancelled():
            ended.exception()  # so that asyncio does not report it as never retrieved

    task.add_done_callback(forget)
    logger.warning(
        "%s waits no longer for %s, which ignores its cancellation and is left running; so are %d such calls "
        "of this process",
        wait.owner,
        wait.what,
        len(_abandoned),
    )


class _Deadline:
    """Cancels the task that made it, and distinguishes this from a cancellation by another caller.

    Python 3.10 does not count cancellations: if the task is cancelled in the same turn of the loop in
    which the deadline passes, the caller gets WaitTimeout on 3.10, and CancelledError from 3.11.
    """

    def __init__(self, wait: Wait, excused_s: Callable[[], float] | None) -> None:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        assert wait.timeout_s is not None
        self._task = task
        self._wait = wait
        self._excused_s = excused_s or (lambda: 0.0)
        self._seen_s = self._excused_s()
        self._timer = task.get_loop().call_later(wait.timeout_s, self.expire)
        self._cancels_before = self._pending_cancels()
        self.expired = False
        self.why = wait.describe()
        self.held_by = ""

    def expire(self) -> None:
        seen_s, self._seen_s = self._seen_s, self._excused_s()
        if (more_s := self._seen_s - seen_s) > 0:
            self._timer = self._task.get_loop().call_later(more_s, self.expire)
            return
        self.expired = True
        self._task.cancel(EXPIRED)
        # Last: should one of these raise, the wait has ended nevertheless.
        if self._wait.holder is not None:
            self.held_by = f"; {self._wait.holder()}"
        self.why = waits_of(self._task.get_loop()).expired(self._wait)

    def cancelled_from_outside(self) -> bool:
        """Return whether the task was also cancelled by another caller."""
        return self._pending_cancels() - self._cancels_before > 1

    def settle(self) -> None:
        """Undo the cancellation, so that the task counts as cancelled only if another caller cancelled it."""
        self._timer.cancel()
        uncancel = getattr(self._task, "uncancel", None)
        if self.expired and uncancel is not None:
            uncancel()

    def _pending_cancels(self) -> int:
        cancelling: Callable[[], int] = getattr(self._task, "cancelling", lambda: 0)
        return cancelling()
