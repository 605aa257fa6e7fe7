# SPDX-License-Identifier: Apache-2.0
"""One rank of an engine, in the engine's process: stages, commits and verifies versions.

The engines call it between two steps. They only say which adapter knows their weights, and pass the result
to their server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ...core.groups.items import LoadReport
from ..memory.manifest import decode
from ..proof.map_check import RankShare
from ..proof.proof import Prover
from .engine_adapter import EngineAdapter
from .staging import StagingBoard


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
