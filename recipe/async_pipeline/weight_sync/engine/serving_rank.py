# SPDX-License-Identifier: Apache-2.0
"""One rank of an engine, in the engine's process: stages, commits and verifies versions.

The engines call it between two steps. They only say which adapter knows their weights, and pass the result
to their server.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize

import msgspec
import torch

from ...core.groups.items import LoadReport
from ...errors import StagingError, WeightSyncError
from ..memory.board import Board
from ..memory.manifest import UNREADABLE, decode
from ..proof.map_check import RankShare
from ..proof.proof import Prover
from .engine_adapter import EngineAdapter

POLL_S = 0.005
"""Interval for reading the boards, which takes microseconds."""


class Staged(msgspec.Struct, frozen=True):
    """The end of a copy to the device."""

    version: int
    error: str = ""
    """Why it failed; empty if the version is complete."""


class StagingBoard:
    """The board of one engine process, which takes it away when it ends.

    How an engine's process announces that a version is staged on its device, without its loop taking part.

    A thread of the engine fills the standby copy and posts the result on a board in shared memory. The server
    reads the board; to ask the engine instead would wait for its step each time.
    """

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


class ServingRank:
    """The weights of one rank."""

    def __init__(self, adapter: EngineAdapter, *, ranks: int = 1, node: int = 0) -> None:
        """`ranks`: the number of ranks that serve a version together; `node`: which of the replica's nodes
        this is. The segments of the engine core may be on another one.
        """
        self.adapter = adapter
        self._node, self._prover = node, Prover(ranks)
        self._board: StagingBoard | None = None

    def stage(self, manifest: bytes) -> str | None:
        """Begin to stage a version during generation; its load is then a copy within the device.

        Returns the name of the board that announces the end of the copy, or None if the version cannot be
        staged because no load of its layout could be recorded.
        """
        described = decode(manifest).on_node(self._node)
        self._board = board = self._board or StagingBoard()
        board.clear()
        with _writable():
            staging = self.adapter.prepare(described, partial(board.post, described.version))
        return board.name if staging else None

    def load(self, manifest: bytes, piece_bytes: int) -> tuple[LoadReport, RankShare | None]:
        """Load and verify one version; the engine runs nothing else meanwhile.

        Returns the report, and this rank's share of the published tensors if the shares of all ranks must be
        checked together. Raises WeightSyncError or ProofError.
        """
        started = time.perf_counter()
        described, adapter = decode(manifest).on_node(self._node), self.adapter
        # A step may still run on the device, with the weights that are about to be overwritten.
        torch.get_device_module(adapter.device).synchronize(adapter.device)
        with _writable():
            delivered = adapter.commit(described, piece_bytes)
            loaded = time.perf_counter()
            proved = self._prover.prove(described, delivered, lambda: adapter.published(described))
            adapter.seal()
        return proved.report(loaded - started, time.perf_counter() - loaded), proved.share


@contextmanager
def _writable() -> Iterator[None]:
    """Leave the inference mode of an engine, whose tensors could not be written to outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class OpenTime:
    """Seconds with at least one open request; for the rest of the time the devices of a replica were idle.

    The caller passes the current time, in seconds.
    """

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
