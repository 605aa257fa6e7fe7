# SPDX-License-Identifier: Apache-2.0
"""Where an engine's own tables place a published tensor: names, parts of fused tensors and shards.

Read from the modules that compute with the tensors, not from a load: `map_check.py` compares the two.
Tensors that these tables do not explain are left to the checks of order and coverage.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch

from ...weight_sync.engine.engine_adapter import Conversion, Expected
from ...weight_sync.memory.manifest import TensorEntry
from ...weight_sync.proof.element_map import Piece, View
from .served_parts import (
    NOTHING,
    Declare,
    Declared,
    Experts,
    Layers,
    Stacked,
    Target,
    parts_of,
    place_parts,
    place_rows,
    rank_and_size,
)

DROPPED = "the engine's mapper drops its name"
UNUSED = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Tensors of some checkpoints that engines compute themselves."""
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
}
"""Modules that engines fuse, for models whose own table does not say so."""
RENAMED = {"qkv": "qkv_proj"}
"""Fused modules of checkpoints that engines have under another name."""
EXPERT_NAMES = (("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3"))
"""The names of an expert's matrices in checkpoints: gate, down and up."""


class ServedLayout:
    """The tables of one model on one rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Layers,
        packed: Mapping[str, list[str]],
        experts: Experts,
        declare: Declare = lambda layer: NOTHING,
    ) -> None:
        """`packed`: the modules that are fused into one, by its name."""
        self._model, self._layers, self._engine = model, layers, experts
        self._packed = {**FUSED, **packed}
        declared = {layer: declare(layer) for layer in model.modules()}
        self._declared = {layer: found for layer, found in declared.items() if found is not NOTHING}
        self._stacked = {
            layer: found.stacked
            for above, found in self._declared.items()
            if found.stacked is not None
            for layer in above.modules()
        }
        """How experts below a layer are published."""
        self.converted: Mapping[str, Conversion] = {
            f"{path}.{leaf}": partial(_convert, getattr(layer, leaf), conversion)
            for path, layer in model.named_modules()
            for leaf, conversion in declared[layer].converted.items()
        }
        """How elements of served tensors follow from published ones, by tensor, if they are no copies."""
        self._slots: dict[Any, dict[str, list[tuple[str, int, str]]]] = {}
        """The table of experts of each layer, by the start of published names."""
        every = dict(model.named_parameters(remove_duplicate=False))
        self._aliases = every.keys() - dict(model.named_parameters()).keys()

    def is_alias(self, name: str) -> bool:
        """Return whether a published tensor is the second name of another one, e.g. a head that is tied."""
        found = self._descend(name)
        return found is not None and found[0] is None and f"{found[1]}{found[2]}" in self._aliases

    def expected(self, entry: TensorEntry) -> Expected | None:
        """Return where a tensor belongs, or None if the tables do not say."""
        if entry.name.endswith(UNUSED):
            return Expected((), "the engine computes it")
        found = self._descend(entry.name)
        if found is None:
            return Expected((), DROPPED)
        experts, prefix, rest, part = found
        if experts is not None:
            return self._experts(experts, prefix, rest, entry.shape)
        target = self._target(prefix + rest, part)
        return None if target is None else self._of_module(target, entry.shape)

    def _at(self, path: str) -> Declared:
        """Return what the layer at a path declares."""
        return self._declared.get(self._model.get_submodule(path), NOTHING)

    def _descend(self, name: str) -> tuple[torch.nn.Module | None, str, str, Any] | None:
        """Follow a name as the loaders do: each module may map the names below it.

        Returns the layer of experts that the name belongs to, the prefix of that layer, the mapped name below
        it and the part; without a layer of experts if it belongs to none. None if a mapper drops the name.
        """
        module: torch.nn.Module = self._model
        prefix, rest, part = "", name, None
        while True:
            mapper = getattr(module, "hf_to_vllm_mapper", None)
            if mapper is not None:
                mapped = mapped_name(mapper, rest)
                if mapped is None:
                    return None
                rest, found = mapped
                part = part if found is None else found
            rest = self._declared.get(module, NOTHING).renamed.get(rest, rest)
            if "routed_experts" in module._modules:
                module, prefix = module.get_submodule("routed_experts"), f"{prefix}routed_experts."
                rest = rest.removeprefix("routed_experts.")
            if holds_experts(module):
                return module, prefix, rest, part
            child, _, below = rest.partition(".")
            slot = _slot_of_shared(module) if child == "shared_experts" else None
            if slot is not None:
                child, below, rest = "experts", f"{slot}.{below}", f"experts.{slot}.{below}"
            if not below or child not in module._modules:
                return None, prefix, rest, part
            module, prefix, rest = module.get_submodule(child), f"{prefix}{child}.", below

    def _target(self, name: str, part: Any) -> Target | None:
        """Return the served tensor of a mapped name; older models fuse modules without a mapper."""
        if self._tensor(name) is not None:
            return Target(name, part)
        module, _, leaf = name.rpartition(".")
        parent, _, own = module.rpartition(".")
        for fused, parts in [*self._packed.items(), (RENAMED.get(own, own), ())]:
            candidate = f"{parent}.{fused}.{leaf}" if parent else f"{fused}.{leaf}"
            if (own in parts or not parts) and self._tensor(candidate) is not None:
                return Target(candidate, parts.index(own) if parts else part)
        return None

    def _tensor(self, name: str) -> torch.Tensor | None:
        path, _, leaf = name.rpartition(".")
        try:
            found = getattr(self._model.get_submodule(path), leaf, None)
        except AttributeError:
            return None
        return found if isinstance(found, torch.Tensor) else None

    def _of_module(self, target: Target, shape: tuple[int, ...]) -> Expected | None:
        served = self._tensor(target.served)
        assert served is not None
        path, _, leaf = target.served.rpartition(".")
        module, layer = self._model.get_submodule(path), self._at(path)
        output, reduced = getattr(served, "output_dim", None), getattr(served, "input_dim", None)
        whole = View(0, tuple(served.shape), served.stride())

        if leaf in layer.sharded:
            rows = served.shape[0]
            return place_rows(target.served, shape, whole, 0, layer.rank * rows, 0, rows)
        if isinstance(module, self._layers.embedding) and output is not None:
            indices = module.shard_indices
            start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
            return place_rows(target.served, shape, whole, output, start, 0, end - start)
        if isinstance(module, self._layers.column) and output is not None:
            above, _, own = path.rpartition(".")
            declared, rank = self._at(above), rank_and_size(module)[0]
            parts = declared.parts.get(own) or parts_of(module, self._layers)
            if not isinstance(target.part, list):
                return place_parts(parts, rank, target, shape, whole, output, declared.arranged.get(own))
            # The same values in several parts.
            every = [
                place_parts(parts, rank, Target(target.served, part), shape, whole, output)
                for part in target.part
            ]
            pieces = [one.pieces for one in every if one is not None]
            return Expected(tuple(chain.from_iterable(pieces))) if len(pieces) == len(every) else None
        if isinstance(module, self._layers.row) and reduced is not None and len(shape) > reduced:
            length = served.shape[reduced]
            first = rank_and_size(module)[0] * length
            return place_rows(target.served, shape, whole, reduced, first, 0, length)
        if target.part is None and tuple(served.shape) == tuple(shape):
            return Expected((Piece(View.whole(shape), target.served, whole),))
        if target.part in (0, 1) and len(self._packed.get(path.rpartition(".")[2], ())) == 2:
            # Every rank has both parts: the first one is at the beginning, the other one at the end.
            start = (served.shape[0] - shape[0]) * target.part
            return place_rows(target.served, shape, whole, 0, 0, start, shape[0])
        return None

    def _experts(self, experts: Any, prefix: str, rest: str, shape: tuple[int, ...]) -> Expected | None:
        """Find one expert's matrix in the slots of this rank; redundant experts have several."""
        if "." not in rest:
            leaf = self._engine.stacked(experts).get(rest, rest)
            served = getattr(experts, leaf, None)
            return self._all_experts(experts, prefix + leaf, shape) if served is not None else None
        slots = self._slots_of(experts, rest)
        if len(shape) != 2 or not slots:
            return None
        rank, size = self._engine.rank_and_size(experts)
        pieces = []
        for leaf, expert, shard in slots:
            served = getattr(experts, leaf, None)
            if served is None or served.dim() != 3 or getattr(served, "is_transposed", False):
                return None
            slot = experts._map_global_expert_id_to_local_expert_id(expert)
            if slot < 0:
                continue
            matrix = self._view_of(experts, served).select(0, slot)
            axis = 1 if shard == "w2" else 0
            length = shape[axis] // size
            source = View.whole(shape).narrow(axis, rank * length, length)
            # The matrices of gate and up are on top of each other, each padded by itself.
            lower = shard == ("w1" if self._engine.up_first(experts) else "w3")
            start = matrix.shape[0] // 2 if lower else 0
            target = matrix.narrow(0, start, source.shape[0]).narrow(1, 0, source.shape[1])
            pieces.append(Piece(source, prefix + leaf, target))
        return Expected(tuple(pieces))

    def _all_experts(self, experts: Any, served_name: str, shape: tuple[int, ...]) -> Expected | None:
        """Find the matrices or biases of all experts, published in one tensor."""
        leaf, stacked = served_name.rpartition(".")[2], self._stacked.get(experts, Stacked())
        served = self._view_of(experts, getattr(experts, leaf))
        slots = [experts._map_global_expert_id_to_local_expert_id(expert) for expert in range(shape[0])]
        held = [expert for expert, slot in enumerate(slots) if slot >= 0]
        if not held or len(shape) != len(served.shape) or [slots[e] for e in held] != list(range(len(held))):
            return None
        if held != list(range(held[0], held[0] + len(held))):
            return None
        source = View.whole(shape)
        source = source.exchanged() if stacked.exchanged and len(shape) == 3 else source
        halves = [(source, served)]
        if leaf.startswith("w13") and not stacked.alternate:
            lower = self._engine.up_first(experts)
            halves = [(_half(source, index), _half(served, index ^ lower)) for index in (0, 1)]
        rank, size = self._engine.rank_and_size(experts)
        pieces = []
        for source, target in halves:
            if leaf.startswith("w13") or len(shape) == 3:
                axis = 1 if leaf.startswith("w13") else 2
                length = source.shape[axis] // size
                source = source.narrow(axis, rank * length, length)
            elif rank:
                return Expected(())  # the output of all ranks is summed, and only the first one adds the bias
            if any(has > room for has, room in zip(source.shape[1:], target.shape[1:], strict=True)):
                return None
            target = target.narrow(0, 0, len(held))
            for axis in range(1, len(shape)):
                target = target.narrow(axis, 0, source.shape[axis])
            pieces.append(Piece(source.narrow(0, held[0], len(held)), served_name, target))
        return Expected(tuple(pieces))

    @staticmethod
    def _view_of(experts: Any, served: torch.Tensor) -> View:
        """Return the view of a layer's matrices as [expert, output, input]."""
        whole = View(0, tuple(served.shape), served.stride())
        exchanged = served.dim() == 3 and getattr(experts, "use_triton_kernels", False)
        return whole.exchanged() if exchanged else whole

    def _slots_of(self, experts: Any, rest: str) -> list[tuple[str, int, str]]:
        """Return the served tensor, the expert and the shard of each place of a published one."""
        if experts not in self._slots:
            table: dict[str, list[tuple[str, int, str]]] = {}
            for parameter, published, expert, shard in self._engine.table(experts):
                leaf = parameter.removeprefix("experts.").removeprefix("routed_experts.")
                table.setdefault(published, []).append((leaf, expert, shard))
            self._slots[experts] = table
        # A published name of the table ends in a dot, e.g. "experts.3.gate_proj.".
        published, _, leaf = f"experts.{rest}".rpartition(".")
        slots = self._slots[experts].get(f"{published}.", ())
        return [(parameter + leaf, expert, shard) for parameter, expert, shard in slots]


def _convert(served: torch.Tensor, conversion: Conversion, values: torch.Tensor) -> torch.Tensor:
    """Convert values as the engine does: on its device, in its precision."""
    return conversion(values.to(served.device, served.dtype)).cpu()


def _half(view: View, index: int) -> View:
    """Return the upper or the lower half of all experts' rows."""
    rows = view.shape[1] // 2
    return view.narrow(1, index * rows, rows)


def mapped_name(mapper: Any, name: str) -> tuple[str, Any] | None:
    """Return the name and the part that an engine's mapper gives, or None if it drops the name."""
    methods = ("_map_name_with_shard", "map_name", "_map_name")
    method = next((one for one in methods if hasattr(mapper, one)), methods[0])
    mapped = getattr(mapper, method)(name)
    return (mapped, None) if isinstance(mapped, str) else mapped


def _slot_of_shared(module: torch.nn.Module) -> int | None:
    """Return which expert of a layer is the shared one, or None if it is no expert of the layer."""
    experts = module._modules.get("experts")
    if "shared_experts" in module._modules or getattr(experts, "num_fused_shared_experts", 0) != 1:
        return None
    return getattr(experts, "_num_global_routed", None)


def holds_experts(module: torch.nn.Module) -> bool:
    """Return whether a module has the matrices of a layer's experts."""
    return hasattr(module, "_map_global_expert_id_to_local_expert_id") and any(
        name.startswith("w13_") for name in module._parameters
    )
