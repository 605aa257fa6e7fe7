# SPDX-License-Identifier: Apache-2.0
"""The clock of the event loop, a loop whose time is virtual, and the one bounded wait.

Everything in `core` reads the time from the running loop and waits through it. On an ordinary loop that is
monotonic real time. On `VirtualTimeLoop`, time stands still while anything can run and jumps to the next
timer when nothing can, so an hour of schedule costs as much as its callbacks.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from ...errors import WaitTimeout

T = TypeVar("T")

FINEST_RESOLUTION_S = 1e-9
"""The resolution of a virtual clock near zero; a large time is as fine as a float can be."""


class Clock(Protocol):
    """A source of the current time."""

    def now(self) -> float:
        """Return the seconds since an arbitrary origin; never decreases."""


class LoopClock:
    """The clock of the running event loop."""

    def now(self) -> float:
        """Return seconds, real or virtual as the loop is. Raises RuntimeError if no loop is running."""
        return asyncio.get_running_loop().time()


class _NeverWaits(selectors.SelectSelector):
    """Never reports input; where the loop would block it calls `on_idle` instead."""

    def __init__(self, on_idle: Callable[[], None]) -> None:
        super().__init__()
        self._on_idle = on_idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._on_idle()
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time 0 and jumps to the next timer whenever nothing is ready.

    It supports timers and callbacks only: no files, sockets, subprocesses or threads. When nothing is
    ready and no timer is set, nothing can ever happen again, and `run_*` raises WaitTimeout with the
    names of the waiting tasks.

    A model with millions of internal events, few of which concern a task, need not set a timer for each:
    see `attach`.
    """

    _scheduled: list[asyncio.TimerHandle]  # asyncio's own heap; its head is live whenever it selects
    _clock_resolution: float

    def __init__(self) -> None:
        super().__init__(_NeverWaits(self._jump))
        self._now = 0.0
        self._clock_resolution = FINEST_RESOLUTION_S
        self._attached: list[Callable[[float], object]] = []

    def attach(self, advance: Callable[[float], object]) -> None:
        """Call `advance(until)` before each jump; `until` is the next timer, or infinity if no timer
        is set.

        `advance` moves its model forward, to `until` at most. If an event of the model concerns a
        task, it sets a timer for that event and stops.
        """
        self._attached.append(advance)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Raise NotImplementedError: time would jump while the thread works."""
        raise NotImplementedError("virtual time has no threads; await a fake of this call instead")

    def _jump(self) -> None:
        for advance in self._attached:
            advance(self._scheduled[0].when() if self._scheduled else math.inf)
        if not self._scheduled:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            names = ", ".join(waiting) or "none"
            raise WaitTimeout(f"virtual time: every task waits and no timer is set: {names}")
        self._now = self._scheduled[0].when()
        # asyncio runs the timers before now + resolution. Where a float is coarser than the resolution
        # that sum is `now` itself, the timer would never count as due and the loop would spin.
        self._clock_resolution = max(FINEST_RESOLUTION_S, math.ulp(self._now))


def run_virtual(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a new VirtualTimeLoop and return its result.

    Tasks that it leaves behind are cancelled and awaited, async generators and the loop are closed.
    Raises what the coroutine raises, and WaitTimeout if every task waits and no timer is set.
    """
    loop = VirtualTimeLoop()
    try:
        try:
            return loop.run_until_complete(coro)
        finally:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel and await every task; errors that they raise meanwhile go to the loop's exception handler."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler(
                {"message": "a task failed while it was cancelled", "exception": error, "task": task}
            )
