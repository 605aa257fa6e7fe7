# SPDX-License-Identifier: Apache-2.0
"""The transformer of an image engine: stages, loads and verifies versions. Runs in the engine's thread."""

from __future__ import annotations

import time
from functools import partial

import torch

from ....core.items import LoadReport
from ....diffusion.transformer_adapter import TransformerAdapter
from ....weight_sync.engine.staging import StagingBoard
from ....weight_sync.memory.manifest import decode
from ....weight_sync.proof.proof import Prover


class TransformerRank:
    """One transformer that serves versions."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._adapter, self._prover = TransformerAdapter(model, device), Prover()
        self._device = device
        self._board: StagingBoard | None = None

    def stage(self, manifest: bytes) -> str | None:
        """Begin to copy a version to the device; return the name of the board that announces the end, or None
        if it cannot be staged.
        """
        described = decode(manifest)
        self._board = board = self._board or StagingBoard()
        board.clear()
        staging = self._adapter.prepare(described, partial(board.post, described.version))
        return board.name if staging else None

    def load(self, manifest: bytes, piece_bytes: int) -> LoadReport:
        """Load and verify one version. Raises WeightSyncError or ProofError."""
        started = time.perf_counter()
        described, adapter = decode(manifest), self._adapter
        if self._device.type != "cpu":
            # A step may still run on the device, with the weights that are about to be overwritten.
            torch.get_device_module(self._device).synchronize()
        with torch.no_grad():
            delivered = adapter.commit(described, piece_bytes)
            loaded = time.perf_counter()
            proved = self._prover.prove(described, delivered, lambda: adapter.published(described))
            adapter.seal()
        load_s, prove_s = loaded - started, time.perf_counter() - loaded
        return proved.report(load_s, prove_s)
