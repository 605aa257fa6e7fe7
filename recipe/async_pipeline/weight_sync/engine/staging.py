# SPDX-License-Identifier: Apache-2.0
"""How an engine's process announces that a version is staged on its device, without its loop taking part.

A thread of the engine fills the standby copy and posts the result on a board in shared memory. The server
reads the board; to ask the engine instead would wait for its step each time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from multiprocessing.util import Finalize

import msgspec

from ...errors import StagingError, WeightSyncError
from ..memory.board import Board
from ..memory.manifest import UNREADABLE

POLL_S = 0.005
"""Interval for reading the boards, which takes microseconds."""


class Staged(msgspec.Struct, frozen=True):
    """The end of a copy to the device."""

    version: int
    error: str = ""
    """Why it failed; empty if the version is complete."""


class StagingBoard:
    """The board of one engine process, which takes it away when it ends."""

    def __init__(self) -> None:
        self._board = Board()
        self._posting = threading.Lock()
        self._closed = False
        # An engine has no call for its end that an extension could use. Runs in child processes too, which
        # skip the functions of `atexit`.
        self._at_exit = Finalize(None, self._take_away, exitpriority=0)

    @property
    def name(self) -> str:
        return self._board.name

    def clear(self) -> None:
        """Forget the previous version."""
        self._board.clear()

    def post(self, version: int, error: BaseException | None) -> None:
        """Announce that the copy of a version has ended. Called from the thread that copied."""
        why = "" if error is None else f"{type(error).__name__}: {error}"
        with self._posting:
            if not self._closed:
                self._board.post(msgspec.msgpack.encode(Staged(version, why)))

    def close(self) -> None:
        """Take the board away; a copy that ends later announces nothing."""
        self._at_exit()

    def _take_away(self) -> None:
        with self._posting:
            self._closed = True
            self._board.close()


async def await_staged(boards: Sequence[str], version: int) -> None:
    """Wait until every board announces a version. Has no deadline.

    Raises StagingError if a copy failed, when all have ended, and WeightSyncError if a newer version took
    its place.
    """
    failed = ""
    for board in [Board(name) for name in boards]:
        # Polling is necessary: the copy is in another process, and the file is not there yet.
        while (found := _read(board)) is None or found.version < version:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if found.version > version:
            raise WeightSyncError(
                f"v{version} was replaced by v{found.version} during its copy to the device"
            )
        failed = failed or found.error
    if failed:
        raise StagingError(failed)


def _read(board: Board) -> Staged | None:
    data = board.read()
    if data is None:
        return None
    try:
        return msgspec.msgpack.decode(data, type=Staged)
    except UNREADABLE as error:
        raise WeightSyncError(f"not an announcement of a staged version: {error}") from error
