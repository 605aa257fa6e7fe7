# SPDX-License-Identifier: Apache-2.0
"""Inside vLLM's worker process: load a complete version from shared memory and prove it.

On CPU, vLLM repacks the weight of each linear layer and frees the original. Weights could then be
neither loaded in place nor compared, and with tied embeddings a reload leaves the head on its dummy
values without a word. So the repack is switched off before the model is built.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import vllm._custom_ops as vllm_ops
import vllm.model_executor.layers.utils as vllm_layers
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

from ..weight_sync.arena import ArenaReader
from ..weight_sync.delivery import ServedModel, prove
from ..weight_sync.manifest import Manifest, decode
from ..weight_sync.stage import Stage


def keep_weights_unpacked() -> None:
    """Make vLLM's CPU linear layers use their weight as it is. Must run before the model is built."""
    vllm_ops._supports_onednn = False
    vllm_layers.check_cpu_sgl_kernel = lambda n, k, dtype: False


class PipelineWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, plus `load_snapshot`, and `stage_snapshot` before it if that is wanted."""

    _reader: ArenaReader | None = None
    _stage: Stage | None = None

    def __new__(cls, **kwargs: Any) -> Any:
        if current_platform.is_cpu():
            keep_weights_unpacked()
        return super().__new__(cls, **kwargs)

    def stage_snapshot(self, manifest: bytes) -> None:
        """Begin to copy a version to the device, beside what the engine does; its load then is a copy there."""
        self._stage = Stage(self._arena_reader(), decode(manifest), self.device)

    def staged_version(self) -> int | None:
        """The version that lies on the device, complete. Raises what the copy raised."""
        return None if self._stage is None else self._stage.version()

    def load_snapshot(self, manifest: bytes, piece_bytes: int) -> tuple[dict[str, float], dict[str, int]]:
        """Load and prove one version; the engine runs nothing else meanwhile.

        Returns seconds and the number of tensors compared, and how many output tokens each request in the batch
        has. Raises WeightSyncError, ProofError.
        """
        started = time.perf_counter()
        described = decode(manifest)
        model = self.model_runner.model
        with torch.no_grad():
            for piece in self._pieces(described, piece_bytes):
                self._load_piece(model, piece)
            for served, config in self._iter_all_models_with_config():
                process_weights_after_loading(served, config, self.device)
        loaded = time.perf_counter()
        compared = prove(described, served_model(model))
        report = {
            "load_s": loaded - started,
            "prove_s": time.perf_counter() - loaded,
            "tensors_proved": float(compared),
        }
        return report, self._output_tokens()

    def _pieces(self, described: Manifest, piece_bytes: int) -> Iterable[list[tuple[str, torch.Tensor]]]:
        """The version's tensors: those on the device, if they are of this version, or else the arena's."""
        stage, self._stage = self._stage, None
        if stage is not None and stage.version() == described.version:
            return [stage.tensors]
        return self._arena_reader().read(described, piece_bytes)

    def _output_tokens(self) -> dict[str, int]:
        """Also counts a token whose step the scheduler does not know to be finished."""
        batch = self.model_runner.input_batch
        return {
            request: int(batch.num_tokens_no_spec[index] - batch.num_prompt_tokens[index])
            for request, index in batch.req_id_to_index.items()
        }

    def _load_piece(self, model: torch.nn.Module, piece: list[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(iter(piece))

    def _arena_reader(self) -> ArenaReader:
        self._reader = self._reader or ArenaReader()
        return self._reader


def served_model(model: torch.nn.Module) -> ServedModel:
    """The parameters that this rank computes with, by name."""
    return ServedModel(
        dict(model.named_parameters(remove_duplicate=False)),
        getattr(model, "packed_modules_mapping", {}),
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
    )
