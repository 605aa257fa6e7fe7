# SPDX-License-Identifier: Apache-2.0
"""Let calls that arrive together begin a few at a time, so that calls of other kinds run in between.

An event loop runs everything that is ready before it looks for new work. Thousands of requests that arrive
at once would all begin first, and each of them takes about a millisecond; a control call would wait behind
all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 4
"""Calls that begin in one turn of the event loop."""


class PacedStarts:
    """Grants starts in the order in which they are requested. For one event loop."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = self._room = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._next: asyncio.Handle | None = None

    async def turn(self) -> None:
        """Return when this call may begin. Waits for: at most the next turns of the event loop."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.call_soon(self._begin_turn)
        if self._room and not self._waiting:
            self._room -= 1
            return
        granted: asyncio.Future[None] = loop.create_future()
        self._waiting.append(granted)
        await granted

    def _begin_turn(self) -> None:
        self._room, self._next = self._per_turn, None
        while self._waiting and self._room:
            granted = self._waiting.popleft()
            # A cancelled call takes no place.
            if not granted.done():
                granted.set_result(None)
                self._room -= 1
        if self._waiting:
            self._next = asyncio.get_running_loop().call_soon(self._begin_turn)
