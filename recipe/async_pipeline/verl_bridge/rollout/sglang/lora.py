# SPDX-License-Identifier: Apache-2.0
"""The LoRA adapter that SGLang serves: one rank's part of the newest one, in SGLang's own pool of adapters.

SGLang adds the product of an adapter's two matrices to the output of each layer, and multiplies it by the
adapter's scaling there, so the pool has the published values as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.lora.lora_registry import LoRARef
from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME, sglang_lora_target_modules

from ....errors import ProofError, WeightSyncError
from ....weight_sync.engine.copy_plan import view_of
from ....weight_sync.engine.engine_adapter import Delivered, Expected
from ....weight_sync.memory.manifest import Manifest, TensorEntry
from ....weight_sync.proof.element_map import ElementMap, Piece, View
from ..served_parts import parts_of, rank_and_size
from .layout import LAYERS

ALL_LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""SGLang's names of the layers that peft's `all-linear` means. SGLang's `all` also includes the embedding and
the head, to which peft adds nothing.
"""
NOT_APPLIED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias")
"""Settings of peft without which SGLang would compute something else; it ignores most of them."""


def target_modules(chosen: Any) -> list[str]:
    """Return verl's `model.target_modules` as SGLang names them."""
    named: list[str] = sglang_lora_target_modules(chosen)
    return list(ALL_LINEAR) if named == ["all"] else named


def served_reference() -> LoRARef:
    """Return the adapter under the name that verl's server requests, with an id that never changes."""
    name = SGLANG_LORA_NAME
    return LoRARef(lora_id=name, lora_name=name, lora_path=name, pinned=False)


class ServedAdapter:
    """The adapter of one rank."""

    def __init__(self, manager: Any, packed: Mapping[str, Sequence[str]]) -> None:
        """`manager` is SGLang's `LoRAManager`; `packed` has the modules that are fused into one."""
        self._manager, self._reference = manager, served_reference()
        self._places = dict(_places(manager.lora_modules, packed))

    def replace(self, manifest: Manifest, config: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load an adapter in the place of the previous one, for running requests too.

        Raises WeightSyncError if SGLang would not serve it as peft computes it.
        """
        described = json.loads(config)
        for key in NOT_APPLIED:
            if described.get(key):
                raise WeightSyncError(
                    f"v{manifest.version}: the adapter has {key}={described[key]!r}, which SGLang does "
                    "not apply"
                )

        manager, name = self._manager, self._reference.lora_id
        if name in manager.loras:
            manager.unload_lora_adapter(self._reference)
        # The manager keeps the tensors, and the arena will be overwritten.
        copies = {key: tensor.clone() for key, tensor in tensors.items()}
        loaded = manager.load_lora_adapter_from_tensors(self._reference, copies, described)
        if not loaded.success:
            raise WeightSyncError(f"v{manifest.version}: SGLang refuses the adapter: {loaded.error_message}")

        pool = manager.memory_pool
        if name not in pool.uid_to_buffer_id:
            manager.fetch_new_loras({name})
            return
        # SGLang fills a slot of the pool only once for each id.
        pool.load_lora_weight_to_buffer(
            name,
            pool.uid_to_buffer_id[name],
            manager.loras[name],
            manager.lora_modules,
            manager.embed_tokens_module,
            manager.lm_head_module,
        )

    def delivered(self, manifest: Manifest) -> Delivered:
        """Describe the tensors that the layers compute with, by published name."""
        slot = self._manager.memory_pool.uid_to_buffer_id[self._reference.lora_id]
        served, pieces = {}, {}
        for entry in manifest.tensors:
            served[entry.name], source = self._served(entry, slot)
            pieces[entry.name] = (Piece(source, entry.name, view_of(served[entry.name])),)
        return Delivered(served, ElementMap(pieces), lambda entry: Expected(pieces[entry.name]))

    def _served(self, entry: TensorEntry, slot: int) -> tuple[torch.Tensor, View]:
        """Return this rank's share of a matrix, and which part of the published one it is.

        Raises ProofError if no layer of the engine takes it.
        """
        module, _, leaf = entry.name.removeprefix("base_model.model.").rpartition(".lora_")
        if module not in self._places or len(entry.shape) != 2:
            raise ProofError(f"{entry.name} was published but no layer of the engine takes it")
        layer, index = self._places[module]
        base, whole = layer.base_layer, View.whole(entry.shape)
        row, rank = isinstance(base, LAYERS.row), rank_and_size(base)[0]

        if leaf.startswith("A"):
            size = entry.shape[0]
            held = _buffer(layer, "A")[slot].narrow(0, index * size, size)
            columns = held.shape[1]
            return held, whole.narrow(1, rank * columns, columns) if row else whole

        held = _buffer(layer, "B")[slot][:, : entry.shape[1]]
        if row:
            return held, whole
        parts = list(parts_of(base, LAYERS).values())
        start, part = sum(one.served for one in parts[:index]), parts[index]
        source = whole.narrow(0, rank // part.replicas * part.served, part.served)
        return held.narrow(0, start, part.served), source


def _places(
    modules: Sequence[Mapping[str, Any]], packed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, tuple[Any, int]]]:
    """Yield the layer of each published module, and which part of a fused layer the module is."""
    for of_layer in modules:
        for name, layer in of_layer.items():
            parent, _, own = name.rpartition(".")
            for index, part in enumerate(packed.get(own) or [own]):
                yield f"{parent}.{part}", (layer, index)


def _buffer(layer: Any, which: str) -> torch.Tensor:
    """Return the matrices that a layer computes with, of all slots of the pool."""
    found: torch.Tensor = getattr(layer, f"{which}_buffer_qkv", None)
    return found if found is not None else getattr(layer, f"{which}_buffer")
