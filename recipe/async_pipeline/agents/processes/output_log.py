# SPDX-License-Identifier: Apache-2.0
"""What the commands of an episode write to stdout and stderr, bounded: its beginning and its end.

agent, verify ──pipes──► OutputLog ──► the attempt failed: FailedAttempt ──► file of the run directory
                                  └──► otherwise it is forgotten
"""

from __future__ import annotations

HEAD_BYTES, TAIL_BYTES = 1 << 14, 3 << 14
"""How much is kept of the beginning and of the end of the output of one attempt."""


class OutputLog:
    """The output of one attempt, in the order in which it arrived."""

    def __init__(self) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append output."""
        self._size += len(data)
        room = HEAD_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def text(self) -> str:
        """Return it, with a line that says how much is missing in the middle, if anything is."""
        tail = bytes(self._tail[-TAIL_BYTES:])
        missing = self._size - len(self._head) - len(tail)
        gap = f"\n[... {missing} bytes are not kept ...]\n".encode() if missing else b""
        return (bytes(self._head) + gap + tail).decode(errors="replace")
