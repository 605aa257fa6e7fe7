# SPDX-License-Identifier: Apache-2.0
"""Hold attempts back while an engine is paused."""

from __future__ import annotations

import asyncio
import itertools
from operator import itemgetter


class AttemptGate:
    """Attempts pass while it is open. When it opens, they pass in the order in which their requests came."""

    def __init__(self) -> None:
        self.is_open = True
        self.closings = 0
        """How often it was closed: an attempt that passed before may have reached a paused engine."""
        self._arrivals = itertools.count()
        self._held: list[tuple[int, asyncio.Future[None]]] = []

    def arrive(self) -> int:
        """Return the number of a request, for all of its attempts."""
        return next(self._arrivals)

    async def passed(self, arrival: int) -> int:
        """Return `closings` as soon as an attempt may begin.

        Waits for: an open gate. Unblocked by: `open`.
        """
        while not self.is_open:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held.append((arrival, turn))
            await turn
        return self.closings

    def close(self) -> None:
        self.is_open = False
        self.closings += 1

    def open(self) -> None:
        self.is_open = True
        held, self._held = sorted(self._held, key=itemgetter(0)), []
        for _, turn in held:
            if not turn.done():  # otherwise its request was cancelled
                turn.set_result(None)
