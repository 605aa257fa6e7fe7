# SPDX-License-Identifier: Apache-2.0
"""How long a replica had open requests. For the rest of the time its devices were idle."""

from __future__ import annotations


class OpenTime:
    """Seconds with at least one open request. The caller passes the current time, in seconds."""

    def __init__(self) -> None:
        self._open = 0
        self._since = 0.0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """Count a request as open."""
        if self._open == 0:
            self._since = now
        self._open += 1

    def end(self, now: float) -> None:
        """Count a request as finished. Raises ValueError if none is open."""
        if self._open == 0:
            raise ValueError("a request ended and none was open")
        self._open -= 1
        if self._open == 0:
            self._seconds += now - self._since

    def take(self, now: float) -> float:
        """Return the seconds since the previous call."""
        if self._open:
            self._seconds += now - self._since
            self._since = now
        seconds, self._seconds = self._seconds, 0.0
        return seconds
