# SPDX-License-Identifier: Apache-2.0
"""Inside vLLM's worker process: load a complete version from shared memory and verify it."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.platforms import current_platform

from ....weight_sync.engine.serving_rank import ServingRank
from ....weight_sync.proof.map_check import RankShare
from .adapter import VllmAdapter, keep_weights_unpacked


def engine_facts(worker: Any) -> dict[str, str]:
    """Return the facts of one rank, as plain values. `worker` is vLLM's; its model must be built."""
    runner, config = worker.model_runner, worker.vllm_config
    # The classes of both runners have the same name; only the second one keeps requests in states.
    generation = "V2" if hasattr(runner, "req_states") else "V1"
    attention = {
        _name_of(module.attn_backend) for module in runner.model.modules() if hasattr(module, "attn_backend")
    }
    executor = config.parallel_config.distributed_executor_backend
    return {
        "model runner": f"{generation} ({type(runner).__module__}.{type(runner).__qualname__})",
        "attention": ", ".join(sorted(attention)) or "unknown",
        "executor": executor if isinstance(executor, str) else getattr(executor, "__qualname__", "unknown"),
        "CUDA graphs": "off" if config.model_config.enforce_eager else "on",
    }


def _name_of(backend: Any) -> str:
    """Return the name of an attention: a language model has its class, a vision tower a member of an enum."""
    return _of_member(backend) if isinstance(backend, Enum) else str(backend.get_name())


def _of_member(member: Enum) -> str:
    return member.name


def engine_line(version: str, facts: dict[str, str]) -> str:
    """Return the facts as one line of a run's output."""
    return f"engine: vLLM {version}, {', '.join(f'{name} {fact}' for name, fact in facts.items())}"


class PipelineWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, plus `load_snapshot`, and `stage_snapshot` for loads staged on the device."""

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
