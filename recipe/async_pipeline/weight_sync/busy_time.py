# SPDX-License-Identifier: Apache-2.0
"""How long a replica had requests open. The rest of the time its devices had nothing to do."""

from __future__ import annotations


class OpenTime:
    """Seconds in which at least one request is open; the caller says what time it is, in seconds."""

    def __init__(self) -> None:
        self._open = 0
        self._since = 0.0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """A request begins."""
        if self._open == 0:
            self._since = now
        self._open += 1

    def end(self, now: float) -> None:
        """A request has ended. Raises ValueError: none is open."""
        if self._open == 0:
            raise ValueError("a request ended and none was open")
        self._open -= 1
        if self._open == 0:
            self._seconds += now - self._since

    def take(self, now: float) -> float:
        """The seconds since this was last asked."""
        if self._open:
            self._seconds += now - self._since
            self._since = now
        seconds, self._seconds = self._seconds, 0.0
        return seconds
