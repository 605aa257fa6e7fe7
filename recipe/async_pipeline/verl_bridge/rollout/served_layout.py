# SPDX-License-Identifier: Apache-2.0
"""Where an engine's own tables place a published tensor: names, parts of fused tensors and shards.

Read from the modules that compute with the tensors, not from a load: `map_check.py` compares the two.
Tensors that these tables do not explain are left to the checks of order and coverage. The layers of all
engines have the same attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...weight_sync.element_map import Piece, View
from ...weight_sync.engine_adapter import Expected
from ...weight_sync.manifest import TensorEntry

DROPPED = "the engine's mapper drops its name"
UNUSED = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Tensors of some checkpoints that engines compute themselves."""


class Target(NamedTuple):
    """The served tensor that a published one belongs to."""

    served: str
    part: str | int | None
    """Which part of a fused tensor, or None if it is the whole."""


class Part(NamedTuple):
    """One part of a fused tensor, along the axis that is sharded."""

    published: int
    """Rows of the whole published part."""
    served: int
    """Rows that each rank serves."""
    replicas: int
    """Number of neighbouring ranks that serve the same rows."""


class Layers(NamedTuple):
    """An engine's classes of layers that are sharded."""

    column: Any
    merged: Any
    """Several matrices on top of each other."""
    qkv: Any
    row: Any
    embedding: Any


class ServedLayout:
    """The tables of one model on one rank."""

    def __init__(self, model: torch.nn.Module, layers: Layers, packed: Mapping[str, list[str]]) -> None:
        """`packed`: the modules that are fused into one, by its name."""
        self._model, self._layers, self._packed = model, layers, packed
        self._slots: dict[Any, dict[str, list[tuple[str, int, str]]]] = {}
        """The table of experts of each layer, by the start of published names."""

    def expected(self, entry: TensorEntry) -> Expected | None:
        """Return where a tensor belongs, or None if the tables do not say."""
        if entry.name.endswith(UNUSED):
            return Expected((), "the engine computes it")
        module, names = self._descend(entry.name)
        if module is None:
            return Expected((), DROPPED)
        prefix, rest, part = names
        experts = getattr(module, "routed_experts", module)
        if hasattr(experts, "get_expert_mapping"):
            inner = f"{prefix}routed_experts." if experts is not module else prefix
            return self._experts(experts, inner, rest, entry.shape)
        target = self._target(prefix + rest, part)
        return None if target is None else self._of_module(target, entry.shape)

    def _descend(self, name: str) -> tuple[torch.nn.Module | None, tuple[str, str, str | int | None]]:
        """Follow a name as the loaders do: each module may map the names below it.

        Returns the last module that maps names or holds experts, with its prefix and the name below it, or
        None if a mapper drops the name.
        """
        module: torch.nn.Module = self._model
        prefix, rest, part = "", name, None
        last = (module, (prefix, rest, part))
        while True:
            mapper = getattr(module, "hf_to_vllm_mapper", None)
            if mapper is not None:
                mapped = mapper._map_name_with_shard(rest)
                if mapped is None:
                    return None, (prefix, rest, part)
                rest, found = mapped
                part = part if found is None else found
                last = (module, (prefix, rest, part))
            child, _, below = rest.partition(".")
            if hasattr(module, "get_expert_mapping") or hasattr(module, "routed_experts"):
                return module, (prefix, rest, part)
            if not below or child not in module._modules:
                return last[0], (prefix, rest, part)
            module, prefix, rest = module.get_submodule(child), f"{prefix}{child}.", below

    def _target(self, name: str, part: str | int | None) -> Target | None:
        """Return the served tensor of a mapped name; older models fuse modules without a mapper."""
        if self._tensor(name) is not None:
            return Target(name, part)
        module, _, leaf = name.rpartition(".")
        parent, _, own = module.rpartition(".")
        for fused, parts in self._packed.items():
            candidate = f"{parent}.{fused}.{leaf}" if parent else f"{fused}.{leaf}"
            if own in parts and self._tensor(candidate) is not None:
                return Target(candidate, parts.index(own))
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
        module = self._model.get_submodule(target.served.rpartition(".")[0])
        output, reduced = getattr(served, "output_dim", None), getattr(served, "input_dim", None)
        whole = View(0, tuple(served.shape), served.stride())

        if isinstance(module, self._layers.embedding) and output is not None:
            indices = module.shard_indices
            start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
            return _piece(target.served, shape, whole, output, start, 0, end - start)
        if isinstance(module, self._layers.column) and output is not None:
            return _parts(parts_of(module, self._layers), module.tp_rank, target, shape, whole, output)
        if isinstance(module, self._layers.row) and reduced is not None and len(shape) > reduced:
            length = served.shape[reduced]
            return _piece(target.served, shape, whole, reduced, module.tp_rank * length, 0, length)
        if target.part is None and tuple(served.shape) == tuple(shape):
            return Expected((Piece(View.whole(shape), target.served, whole),))
        return None

    def _experts(self, experts: Any, prefix: str, rest: str, shape: tuple[int, ...]) -> Expected | None:
        """Find one expert's matrix in the slots of this rank; redundant experts have several."""
        slots = self._slots_of(experts, rest)
        if len(shape) != 2 or not slots:
            return None
        pieces = []
        for leaf, expert, shard in slots:
            served = getattr(experts, leaf, None)
            if served is None or served.dim() != 3 or getattr(served, "is_transposed", False):
                return None
            slot = experts._map_global_expert_id_to_local_expert_id(expert)
            if slot >= 0:
                whole = View(0, tuple(served.shape), served.stride()).select(0, slot)
                pieces.append(_expert_piece(experts, prefix + leaf, shape, whole, shard))
        return Expected(tuple(pieces))

    def _slots_of(self, experts: Any, rest: str) -> list[tuple[str, int, str]]:
        """Return the served tensor, the expert and the shard of each place of a published one."""
        if experts not in self._slots:
            table: dict[str, list[tuple[str, int, str]]] = {}
            for parameter, published, expert, shard in experts.get_expert_mapping():
                table.setdefault(published, []).append((parameter, expert, shard))
            self._slots[experts] = table
        name = f"experts.{rest}"
        # A published name of the table ends in a dot, e.g. "experts.3.gate_proj.".
        published = name[: name.rindex(".") + 1]
        leaf = name.removeprefix(published)
        return [
            ((parameter + leaf).removeprefix("experts."), expert, shard)
            for parameter, expert, shard in self._slots[experts].get(published, ())
        ]


def parts_of(module: Any, layers: Layers) -> dict[str | int, Part]:
    """Return the parts of a column-parallel layer, in their order."""
    size = module.tp_size
    if isinstance(module, layers.qkv):
        replicas = module.num_kv_head_replicas
        return {
            "q": Part(module.total_num_heads * module.head_size, module.num_heads * module.head_size, 1),
            "k": Part(
                module.total_num_kv_heads * module.head_size, module.num_kv_heads * module.head_size, replicas
            ),
            "v": Part(
                module.total_num_kv_heads * module.v_head_size,
                module.num_kv_heads * module.v_head_size,
                replicas,
            ),
        }
    sizes = module.output_sizes if isinstance(module, layers.merged) else [module.output_size]
    return {index: Part(rows, rows // size, 1) for index, rows in enumerate(sizes)}


def _parts(
    parts: Mapping[str | int, Part],
    rank: int,
    target: Target,
    shape: tuple[int, ...],
    whole: View,
    axis: int,
) -> Expected | None:
    """Return the pieces of one part of a fused tensor, of all parts if they are published as one."""
    if type(target.part) is int and "q" in parts:
        target = target._replace(part=("q", "k", "v")[target.part])
    chosen = list(parts) if target.part is None else [target.part]
    if any(part not in parts for part in chosen):
        return None
    if shape[axis] != sum(parts[part].published for part in chosen):
        return None

    found: list[Piece] = []
    source = place = 0
    for name, part in parts.items():
        if name in chosen:
            first = source + rank // part.replicas * part.served
            found += _piece(target.served, shape, whole, axis, first, place, part.served).pieces
            source += part.published
        place += part.served
    return Expected(tuple(found))


def _piece(
    served: str, shape: tuple[int, ...], whole: View, axis: int, source: int, place: int, length: int
) -> Expected:
    """Return the piece of `length` rows or columns from `source` to `place`."""
    part = View.whole(shape).narrow(axis, source, length)
    return Expected((Piece(part, served, whole.narrow(axis, place, length)),) if part.numel else ())


def _expert_piece(experts: Any, served: str, shape: tuple[int, ...], whole: View, shard: str) -> Piece:
    parallel = experts.moe_config.moe_parallel_config
    axis = 1 if shard == "w2" else 0
    length = shape[axis] // parallel.tp_size
    source = View.whole(shape).narrow(axis, parallel.tp_rank * length, length)
    # The matrices of gate and up are on top of each other, each padded by itself.
    start = whole.shape[0] // 2 if shard == "w3" else 0
    target = whole.narrow(0, start, source.shape[0]).narrow(1, 0, source.shape[1])
    return Piece(source, served, target)


def served_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and persistent buffer that a load is responsible for, aliases included."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        for leaf in module._buffers:
            buffer = module._buffers[leaf]
            if leaf in kept and leaf not in OWN_BUFFERS and buffer is not None:
                yield f"{path}.{leaf}" if path else leaf, buffer


OWN_BUFFERS = {"_q_scale", "_k_scale", "_v_scale", "_prob_scale"}
"""Buffers of attention layers, which belong to the KV cache and to no checkpoint."""
