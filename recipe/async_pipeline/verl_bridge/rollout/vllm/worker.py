# SPDX-License-Identifier: Apache-2.0
"""Inside vLLM's worker process: load a complete version from shared memory and verify it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.platforms import current_platform

from ....weight_sync.engine.serving_rank import ServingRank
from ....weight_sync.proof.map_check import RankShare
from .adapter import VllmAdapter, keep_weights_unpacked
from .facts import engine_facts


class PipelineWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, plus `load_snapshot`, and `stage_snapshot` for loads that are staged on the
    device.
    """

    adapter_class: type[VllmAdapter] = VllmAdapter
    _serving: ServingRank | None = None

    def __new__(cls, **kwargs: Any) -> Any:
        if current_platform.is_cpu():
            keep_weights_unpacked()
        return super().__new__(cls, **kwargs)

    def engine_facts(self) -> dict[str, str]:
        """Return which of vLLM's paths this rank has taken."""
        return engine_facts(self)

    def stage_snapshot(self, manifest: bytes) -> str | None:
        """Start to stage a version during generation; see `ServingRank.stage`."""
        return self._serving_rank().stage(manifest)

    def load_snapshot(self, manifest: bytes, piece_bytes: int) -> tuple[dict[str, Any], RankShare | None]:
        """Load and verify one version; see `ServingRank.load`. Returns its report as a dict."""
        report, share = self._serving_rank().load(manifest, piece_bytes)
        # vLLM passes only plain values between its processes.
        return asdict(report), share

    def _serving_rank(self) -> ServingRank:
        self._serving = self._serving or ServingRank(
            self.adapter_class(self),
            ranks=get_tensor_model_parallel_world_size(),
            node=self.parallel_config.node_rank,
        )
        return self._serving
