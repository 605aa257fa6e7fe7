# SPDX-License-Identifier: Apache-2.0
"""Inside vLLM's worker process: load a complete version from shared memory and verify it."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.platforms import current_platform

from ....weight_sync.engine.staging import StagingBoard
from ....weight_sync.memory.manifest import Manifest, decode
from ....weight_sync.proof.map_check import RankShare
from ....weight_sync.proof.proof import Prover
from .adapter import VllmAdapter, keep_weights_unpacked
from .facts import engine_facts


class PipelineWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, plus `load_snapshot`, and `stage_snapshot` for loads that are staged on the
    device.
    """

    _adapter: VllmAdapter | None = None
    _prover: Prover | None = None
    _staging_board: StagingBoard | None = None

    def __new__(cls, **kwargs: Any) -> Any:
        if current_platform.is_cpu():
            keep_weights_unpacked()
        return super().__new__(cls, **kwargs)

    def engine_facts(self) -> dict[str, str]:
        """Return which of vLLM's paths this rank has taken."""
        return engine_facts(self)

    def stage_snapshot(self, manifest: bytes) -> str | None:
        """Start to stage a version during generation; its load is then a copy within the device.

        Returns the name of the board that announces the end of the copy, or None if the version cannot be
        staged because no load of its layout could be recorded.
        """
        described = self._described(manifest)
        self._staging_board = board = self._staging_board or StagingBoard()
        board.clear()
        staging = self._engine_adapter().prepare(described, partial(board.post, described.version))
        return board.name if staging else None

    def load_snapshot(self, manifest: bytes, piece_bytes: int) -> tuple[dict[str, Any], RankShare | None]:
        """Load and verify one version; the engine runs nothing else meanwhile.

        Returns this rank's LoadReport as a dict, and its share of the published tensors if the shares of all
        ranks must be checked together. Raises WeightSyncError or ProofError.
        """
        started = time.perf_counter()
        described, adapter = self._described(manifest), self._engine_adapter()
        with torch.no_grad():
            delivered = adapter.commit(described, piece_bytes)
        loaded = time.perf_counter()
        self._prover = self._prover or Prover(get_tensor_model_parallel_world_size())
        proved = self._prover.prove(described, delivered, lambda: adapter.published(described))
        adapter.seal()
        load_s, prove_s = loaded - started, time.perf_counter() - loaded
        # vLLM passes only plain values between its processes.
        return asdict(proved.report(load_s, prove_s)), proved.share

    def _described(self, manifest: bytes) -> Manifest:
        """Return the manifest with the segments of this node, which may not be the engine core's."""
        return decode(manifest).on_node(self.parallel_config.node_rank)

    def _engine_adapter(self) -> VllmAdapter:
        self._adapter = self._adapter or VllmAdapter(self)
        return self._adapter
