# SPDX-License-Identifier: Apache-2.0
"""Inside vLLM's worker process: load a complete version from shared memory and verify it.

On CPU, vLLM repacks the weight of each linear layer and frees the original. The weights could then be
neither loaded in place nor compared, and with tied embeddings a reload would silently leave the head on
its dummy values. So the repacking is disabled before the model is built.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import torch
import vllm._custom_ops as vllm_ops
import vllm.model_executor.layers.utils as vllm_layers
from verl.utils.vllm import TensorLoRARequest
from verl.workers.rollout.vllm_rollout.utils import (
    VLLM_LORA_INT_ID,
    VLLM_LORA_NAME,
    VLLM_LORA_PATH,
    vLLMColocateWorkerExtension,
)
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

from ....core.items import LoadReport
from ....errors import ProofError, WeightSyncError
from ....weight_sync.arena import ArenaReader
from ....weight_sync.copy_plan import RecordedLoad, Recorder
from ....weight_sync.manifest import Manifest, decode
from ....weight_sync.proof import ServedModel, prove, scaled
from ....weight_sync.standby_copy import StandbyCopy


def keep_weights_unpacked() -> None:
    """Make vLLM's CPU linear layers use their weight unpacked. Call it before the model is built."""
    vllm_ops._supports_onednn = False
    vllm_layers.check_cpu_sgl_kernel = lambda n, k, dtype: False


class PipelineWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, plus `load_snapshot`, and `stage_snapshot` for loads that are staged on the
    device.
    """

    _reader: ArenaReader | None = None
    _recorded: RecordedLoad | None = None
    _standby: StandbyCopy | None = None

    def __new__(cls, **kwargs: Any) -> Any:
        if current_platform.is_cpu():
            keep_weights_unpacked()
        return super().__new__(cls, **kwargs)

    def stage_snapshot(self, manifest: bytes) -> bool:
        """Start to copy a version to the device during generation; its load is then a copy within the
        device.

        Returns False if it cannot be staged because no load of its layout could be recorded.
        """
        described, parameters = decode(manifest), list(self.model_runner.model.parameters())
        if self._recorded is None or not self._recorded.fits(described, parameters):
            return False
        if self._standby is None:
            # The graphs of an accelerator hold addresses, so memory can be exchanged on CPU only.
            on_cpu = self.device.type == "cpu"
            self._standby = StandbyCopy(self._recorded, parameters, may_exchange=on_cpu)
        self._standby.begin(described, self._published(described))
        return True

    def staged_version(self) -> int | None:
        """Return the version that is complete on the device, or None. Raises the error of the copy."""
        return None if self._standby is None else self._standby.version()

    def load_snapshot(self, manifest: bytes, piece_bytes: int) -> tuple[dict[str, float], dict[str, int]]:
        """Load and verify one version; the engine runs nothing else meanwhile.

        Returns this rank's LoadReport as a dict, and the output tokens of each request in the batch.
        Raises WeightSyncError or ProofError.
        """
        started = time.perf_counter()
        described = decode(manifest)
        model = self.model_runner.model
        with torch.no_grad():
            self._load(model, described, piece_bytes)
        loaded = time.perf_counter()
        compared = self._prove(described, model)
        if self.device.type == "cpu":
            pack_experts(model)
        load_s, prove_s = loaded - started, time.perf_counter() - loaded
        report = LoadReport(load_s=load_s, stall_s=load_s + prove_s, prove_s=prove_s, tensors_proved=compared)
        # vLLM passes only plain values between its processes.
        return asdict(report), self._output_tokens()

    def _load(self, model: torch.nn.Module, described: Manifest, piece_bytes: int) -> None:
        if described.adapter is not None:
            self._load_adapter(described, described.adapter)
        elif self._standby is not None and self._standby.version() == described.version:
            self._standby.commit()
            self._finish_load()
        elif self._recorded is not None and self._recorded.fits(described, model.parameters()):
            self._recorded.copy(described, self._published(described), self._recorded.targets)
            self._finish_load()
        else:
            self._standby = None
            published = self._published(described)
            with Recorder(published) as recorder:
                for piece in self._arena_reader().read(described, piece_bytes):
                    self._load_piece(model, piece)
            self._finish_load()
            self._recorded = recorder.recorded(described, published)

    def _load_adapter(self, described: Manifest, config: str) -> None:
        """Replace the previous adapter, under the name that verl's server requests."""
        self.remove_lora(VLLM_LORA_INT_ID)
        request = TensorLoRARequest(
            lora_name=VLLM_LORA_NAME,
            lora_int_id=VLLM_LORA_INT_ID,
            lora_path=VLLM_LORA_PATH,
            peft_config=json.loads(config),
            # The manager keeps the tensors, and the arena will be overwritten.
            lora_tensors={name: tensor.clone() for name, tensor in self._published(described).items()},
        )
        self.add_lora(request)

    def _prove(self, described: Manifest, model: torch.nn.Module) -> int:
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        if described.adapter is None:
            packed = getattr(model, "packed_modules_mapping", {})
            return prove(
                described,
                ServedModel(dict(model.named_parameters(remove_duplicate=False)), packed, rank, size),
            )
        adapters = self.model_runner.lora_manager._adapter_manager
        served = served_adapter(adapters, described, VLLM_LORA_INT_ID)
        scaling = PEFTHelper.from_dict(json.loads(described.adapter)).vllm_lora_scaling_factor
        return prove(
            scaled(described, ".lora_B.", scaling, adapters.lora_config.lora_dtype),
            ServedModel(served, {}, rank, size),
        )

    def _finish_load(self) -> None:
        for served, config in self._iter_all_models_with_config():
            process_weights_after_loading(served, config, self.device)

    def _published(self, described: Manifest) -> dict[str, torch.Tensor]:
        reader = self._arena_reader()
        if self.device.type == "cuda":
            reader.pin(described)
        return reader.tensors(described)

    def _output_tokens(self) -> dict[str, int]:
        """Return output tokens by request, including a token whose step the scheduler has not finished."""
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


def pack_experts(model: torch.nn.Module) -> None:
    """Pack the experts of each layer for vLLM's CPU kernels; vLLM does so at the first load only.

    Raises WeightSyncError if they are padded as well, so that no later version fits into them.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
            continue
        if (
            experts._padded_intermediate_size(experts.moe_config)
            != experts.moe_config.intermediate_size_per_partition
        ):
            raise WeightSyncError(
                f"experts of width {experts.moe_config.intermediate_size_per_partition} cannot be updated "
                "on a CPU; "
                f"it must be a multiple of {experts._intermediate_alignment()}"
            )
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data.copy_(vllm_ops.cpu_prepack_moe_weight(weight.data, experts.isa))


def served_adapter(adapters: Any, described: Manifest, adapter: int) -> dict[str, torch.Tensor]:
    """Return the tensors that an adapter computes with, by published name.

    Raises ProofError if the adapter is not active or no layer of the engine takes a tensor.
    """
    if adapter not in adapters.lora_index_to_id:
        raise ProofError(f"v{described.version}: the adapter is not active")
    slot = adapters.lora_index_to_id.index(adapter)
    places = {name: (layer, 0) for name, layer in adapters.modules.items()}
    for name, layer in adapters.modules.items():
        parent, _, leaf = name.rpartition(".")
        for index, part in enumerate(adapters.packed_modules_mapping.get(leaf, [])):
            places[f"{parent}.{part}"] = (layer, index)
    served = {}
    for entry in described.tensors:
        module, _, leaf = entry.name.removeprefix("base_model.model.").rpartition(".lora_")
        if module not in places:
            raise ProofError(f"{entry.name} was published but no layer of the engine takes it")
        layer, index = places[module]
        stacked = layer.lora_a_stacked if leaf.startswith("A") else layer.lora_b_stacked
        whole = stacked[index][slot, 0]
        # The rank is padded to the largest one that the engine was started for.
        rank_of_adapter = entry.shape[0] if leaf.startswith("A") else entry.shape[1]
        served[entry.name] = whole[:rank_of_adapter] if leaf.startswith("A") else whole[:, :rank_of_adapter]
    return served
