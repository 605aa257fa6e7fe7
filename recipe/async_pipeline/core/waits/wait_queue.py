# SPDX-License-Identifier: Apache-2.0
"""How tasks wait for one another: in a queue, or all for the same news.

`Turnstile` is the one place where tasks queue: strictly first come, first served, and safe to cancel. A turn
is a permission, not an object: the awaited resource stays with its owner until the task that has the turn
takes it. So a task that is cancelled after its turn came holds nothing that could be lost, and no later task
can overtake it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice


class Turnstile:
    """A queue of waiting tasks, of which the first `may_pass()` may continue now.

    The owner calls `wake` whenever `may_pass()` has grown. Each turn that is used decrements it.
    """

    def __init__(self, may_pass: Callable[[], int]) -> None:
        self._may_pass = may_pass
        self._waiters: deque[tuple[str, asyncio.Future[None]]] = deque()

    @property
    def names(self) -> tuple[str, ...]:
        """The waiting tasks in order, including tasks whose turn has come but that have not run yet."""
        return tuple(name for name, _ in self._waiters)

    async def turn(self, name: str = "") -> None:
        """Wait for a turn; returns at once if the queue is empty and a turn is free.

        The caller must use the turn before its next await. Waits for: every task ahead, and
        `may_pass()`. Unblocked by: `wake`. If cancelled, it passes the turn on.
        """
        if not self._waiters and self._may_pass() > 0:
            return
        waiter = (name, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.wake()
        try:
            if waiter[1].done():
                # Awaiting a future that is done does not yield, and those ahead have not run yet.
                await asyncio.sleep(0)
            await waiter[1]
        except BaseException:  # cancelled, or the coroutine was closed while it waited
            self._waiters.remove(waiter)
            self.wake()
            raise
        self._waiters.remove(waiter)

    def wake(self) -> None:
        """Wake the first `may_pass()` waiters, in order."""
        for _, future in islice(self._waiters, max(0, self._may_pass())):
            if not future.done():
                future.set_result(None)


class Broadcast:
    """Wakes all waiting tasks at each call of `notify`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake the tasks that wait now; later ones wait for the next call."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()
