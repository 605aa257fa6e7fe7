# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine adapter: one rank of the engine, in its worker process.

On CPU, vLLM repacks the weight of each linear layer and frees the original. The weights could then be
neither loaded in place nor compared, and with tied embeddings a reload would silently leave the head on
its dummy values. So the repacking is disabled before the model is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import vllm._custom_ops as vllm_ops
from verl.utils.vllm import TensorLoRARequest
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.utils import WeightsMapper

from ....errors import ProofError, WeightSyncError
from ....weight_sync.engine.copy_plan import view_of
from ....weight_sync.engine.engine_adapter import Computed, Conversion, Delivered, Expected
from ....weight_sync.engine.recording_adapter import RecordingAdapter
from ....weight_sync.engine.standby import Convert, Named, StagingEnded, ignore
from ....weight_sync.memory.manifest import Manifest, TensorEntry
from ....weight_sync.proof.element_map import ElementMap, Piece, View
from ... import replaced
from ..served_parts import parts_of, require_fresh_products, served_tensors
from .block_fp8 import BlockFp8
from .layout import LAYERS, served_layout


def keep_weights_unpacked() -> None:
    """Make vLLM's CPU linear layers use their weight unpacked. Call it before the model is built."""
    replaced.apply("vLLM's layers on a CPU")


USE_ONEDNN = False


def no_sgl_kernel(n: int, k: int, dtype: torch.dtype) -> bool:
    """Return that the kernel, which packs its weight, does not support a layer."""
    return False


def renamed_mapper(mapper: Any) -> Any:
    """Return what verl asks a mapper for by the name that vLLM 0.32 has for it."""
    return mapper.get_rename_mapper()


class VllmAdapter(RecordingAdapter):
    """One rank of vLLM; see `EngineAdapter`."""

    def __init__(self, worker: Any) -> None:
        """`worker` is vLLM's worker with verl's extension; its model must be built."""
        super().__init__(worker.device)
        self._worker = worker
        self._model: torch.nn.Module = worker.model_runner.model
        self._table = served_layout(self._model)
        self._fp8 = BlockFp8.of(worker.model_runner, self._table)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return dict(served_tensors(self._model))

    def begin(self) -> None:
        if self._fp8 is not None:
            self._fp8.begin()
        elif self.device.type == "cpu":
            require_unpadded_experts(self._model)

    def convert_piece(self, piece: Sequence[Named]) -> Sequence[Named]:
        return piece if self._fp8 is None else self._fp8.convert_piece(piece, self.device)

    def load(self, pieces: Iterable[Sequence[Named]]) -> None:
        """Load buffers by their names, as verl does, and all others through the model."""
        if self._fp8 is None:
            self._model.load_weights(self._without_buffers(chain.from_iterable(pieces)))
        else:
            for piece in pieces:  # verl's loader would keep all converted tensors until the last one comes
                self._fp8.load(list(self._without_buffers(piece)))

    def _without_buffers(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Load buffers and yield all others, but no second names of tied tensors, which vLLM skips."""
        buffers = dict(self._model.named_buffers())
        for name, tensor in weights:
            if name in buffers:
                if buffers[name].shape != tensor.shape:
                    raise WeightSyncError(
                        f"the buffer {name} was published as {tuple(tensor.shape)}, "
                        f"but is served as {tuple(buffers[name].shape)}"
                    )
                buffers[name].copy_(tensor)
            elif not self._table.is_alias(name):
                yield name, tensor

    def finish(self) -> None:
        if self._fp8 is not None:
            return  # `seal` does this part, since it may change the layout of what is proved
        for served, config in self._worker._iter_all_models_with_config():
            process_weights_after_loading(served, config, self.device)
            require_fresh_products(served)

    def expected(self, entry: TensorEntry) -> Expected | None:
        return self._table.expected(entry)

    def commit(self, manifest: Manifest, piece_bytes: int) -> Delivered:
        if manifest.adapter is None:
            return super().commit(manifest, piece_bytes)
        self.load_adapter(manifest, manifest.adapter)
        return self._delivered_adapter(manifest, manifest.adapter)

    def prepare(self, manifest: Manifest, ended: StagingEnded = ignore) -> bool:
        return manifest.adapter is None and super().prepare(manifest, ended)

    def computed(self) -> Sequence[Computed]:
        return () if self._fp8 is None else self._fp8.computed(self._layout, self.tensors())

    def converted(self) -> Mapping[str, Conversion]:
        return self._table.converted

    def conversion(self) -> Convert | None:
        return None if self._fp8 is None else self._fp8.conversion(self.device)

    def seal(self) -> None:
        if self._fp8 is not None:
            self._fp8.end()
        elif self.device.type == "cpu":
            pack_experts(self._model)

    def load_adapter(self, manifest: Manifest, config: str) -> None:
        """Replace the previous adapter, under the name that verl's server requests."""
        # 0.24 has neither name, and verl does without.
        if hasattr(WeightsMapper, "get_rename_mapper") and not hasattr(WeightsMapper, "get_unstacked_mapper"):
            replaced.apply("vLLM's adapters")
        self._worker.remove_lora(VLLM_LORA_INT_ID)
        request = TensorLoRARequest(
            lora_name=VLLM_LORA_NAME,
            lora_int_id=VLLM_LORA_INT_ID,
            lora_path=VLLM_LORA_PATH,
            peft_config=json.loads(config),
            # The manager keeps the tensors, and the arena will be overwritten.
            lora_tensors={name: tensor.clone() for name, tensor in self.published(manifest).items()},
        )
        self._worker.add_lora(request)

    def _delivered_adapter(self, manifest: Manifest, config: str) -> Delivered:
        """Describe the tensors that the layers compute with, by published name."""
        adapters = self._worker.model_runner.lora_manager._adapter_manager
        served = served_adapter(adapters, manifest, VLLM_LORA_INT_ID)
        places = _places(adapters)
        pieces = {
            entry.name: (_shard(entry, served[entry.name], _replicas(entry, places)),)
            for entry in manifest.tensors
        }
        scaling = PEFTHelper.from_dict(json.loads(config)).vllm_lora_scaling_factor
        dtype = adapters.lora_config.lora_dtype
        converted: dict[str, Conversion] = {
            name: _Scale(scaling, dtype) for name in served if ".lora_B." in name
        }
        return Delivered(served, ElementMap(pieces), lambda entry: Expected(pieces[entry.name]), converted)


class _Scale:
    """vLLM multiplies the second matrix of an adapter by the adapter's scaling factor."""

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        self._factor, self._dtype = factor, dtype

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._dtype) * self._factor if self._factor != 1 else values


def _replicas(entry: TensorEntry, places: Mapping[str, tuple[Any, int]]) -> int:
    """Return the number of neighbouring ranks that have the same rows of an adapter's second matrix."""
    module, leaf = _module_of(entry)
    layer, index = places[module]
    base = layer.base_layer
    if leaf.startswith("A") or not isinstance(base, LAYERS.column):
        return 1
    return list(parts_of(base, LAYERS).values())[index].replicas


def _shard(entry: TensorEntry, served: torch.Tensor, replicas: int) -> Piece:
    """Return the shard of an adapter's matrix, which is split along one axis at most."""
    source = View.whole(entry.shape)
    rank = get_tensor_model_parallel_rank() // replicas
    size = get_tensor_model_parallel_world_size() // replicas
    for axis, (whole, held) in enumerate(zip(entry.shape, served.shape, strict=True)):
        if held != whole:
            if held * size != whole:
                raise ProofError(
                    f"{entry.name} was published as {entry.shape} but is served as {tuple(served.shape)}"
                )
            source = source.narrow(axis, rank * held, held)
    return Piece(source, entry.name, view_of(served))


def packed_experts(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the layers of experts whose weights vLLM's CPU kernels pack, and the kernels."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return  # vLLM 0.24 packs them in `finish`, and the proof refuses them

    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch:
            yield layer, experts


def require_unpadded_experts(model: torch.nn.Module) -> None:
    """Raises WeightSyncError if vLLM has padded experts at its start, so that no version fits into them."""
    for _, experts in packed_experts(model):
        width = experts.moe_config.intermediate_size_per_partition
        if experts._padded_intermediate_size(experts.moe_config) != width:
            raise WeightSyncError(
                f"experts of width {width} cannot be updated on a CPU; "
                f"it must be a multiple of {experts._intermediate_alignment()}"
            )


def pack_experts(model: torch.nn.Module) -> None:
    """Pack the experts of each layer for vLLM's CPU kernels; vLLM does so at the first load only."""
    for layer, experts in packed_experts(model):
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data.copy_(vllm_ops.cpu_prepack_moe_weight(weight.data, experts.isa))


def served_adapter(adapters: Any, described: Manifest, adapter: int) -> dict[str, torch.Tensor]:
    """Return the tensors that an adapter computes with, by published name.

    Raises ProofError if the adapter is not active or no layer of the engine takes a tensor.
    """
    if adapter not in adapters.lora_index_to_id:
        raise ProofError(f"v{described.version}: the adapter is not active")
    slot, places = adapters.lora_index_to_id.index(adapter), _places(adapters)
    served = {}
    for entry in described.tensors:
        module, leaf = _module_of(entry)
        if module not in places:
            raise ProofError(f"{entry.name} was published but no layer of the engine takes it")
        layer, index = places[module]
        stacked = layer.lora_a_stacked if leaf.startswith("A") else layer.lora_b_stacked
        whole = stacked[index][slot, 0]
        # The rank is padded to the largest one that the engine was started for.
        rank_of_adapter = entry.shape[0] if leaf.startswith("A") else entry.shape[1]
        served[entry.name] = whole[:rank_of_adapter] if leaf.startswith("A") else whole[:, :rank_of_adapter]
    return served


def _places(adapters: Any) -> dict[str, tuple[Any, int]]:
    """Return the layer of each published module, and which part of a fused layer the module is."""
    places = {name: (layer, 0) for name, layer in adapters.modules.items()}
    for name, layer in adapters.modules.items():
        parent, _, leaf = name.rpartition(".")
        for index, part in enumerate(adapters.packed_modules_mapping.get(leaf, [])):
            places[f"{parent}.{part}"] = (layer, index)
    return places


def _module_of(entry: TensorEntry) -> tuple[str, str]:
    """Return the module of an adapter's matrix, and the end of its name, which begins with A or B."""
    module, _, leaf = entry.name.removeprefix("base_model.model.").rpartition(".lora_")
    return module, leaf
