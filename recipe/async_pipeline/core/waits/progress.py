# SPDX-License-Identifier: Apache-2.0
"""Work that may take any time while it progresses, and what that means for deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ...errors import WaitTimeout
from .wait_graph import Wait, waits_of

T = TypeVar("T")
POLL_S = 5.0
"""Interval at which progress is measured."""
TELL_S = 30.0
"""Interval at which progress is reported."""


async def while_it_progresses(
    work: Awaitable[T],
    done: Callable[[], Awaitable[int]],
    stall_s: float | None,
    *,
    owner: str,
    what: str,
    tell: Callable[[int, float], object],
) -> T:
    """Await `work` for as long as what `done` counts grows; return its result.

    `done` returns how much has been done. `tell` receives that and the seconds so far, every `TELL_S`
    seconds.
    `what` names the progress in errors, such as "the next byte of a file". The work is cancelled if this
    function ends early.

    Raises WaitTimeout if the count has not grown for `stall_s` seconds (None: no limit). Errors of the
    work and of `done` are passed on.
    """
    loop = asyncio.get_running_loop()
    working = asyncio.ensure_future(work)
    started = told = loop.time()
    wait, most = Wait(owner=owner, what=what, since=started, timeout_s=stall_s), -1
    waits = waits_of(loop)
    try:
        while True:
            with waits.noted(wait):
                await asyncio.wait({working}, timeout=POLL_S)
                if working.done():
                    return working.result()
                count, now = await done(), loop.time()
                if stall_s is not None and count <= most and now - wait.since >= stall_s:
                    raise WaitTimeout(f"{waits.expired(wait)}; nothing has been added to {most:,} bytes")
            if count > most:
                most, wait = count, Wait(owner=owner, what=what, since=now, timeout_s=stall_s)
            if now - told >= TELL_S:
                told = now
                tell(count, now - started)
    finally:
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


class Excused:
    """Counts the seconds that no deadline of a run includes."""

    def __init__(self) -> None:
        self._before, self._since, self._depth = 0.0, 0.0, 0

    def seconds(self) -> float:
        """Return the sum so far."""
        open_s = asyncio.get_running_loop().time() - self._since if self._depth else 0.0
        return self._before + open_s

    @contextmanager
    def block(self) -> Iterator[None]:
        """Count the seconds of the block; overlapping blocks count once."""
        if not self._depth:
            self._since = asyncio.get_running_loop().time()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._before += asyncio.get_running_loop().time() - self._since
