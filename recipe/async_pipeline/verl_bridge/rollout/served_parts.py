# SPDX-License-Identifier: Apache-2.0
"""The parts of fused and sharded tensors, and which of their rows each rank serves.

The layers of all engines have the same attributes. What their classes do not tell is `Declared`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...errors import ProofError
from ...weight_sync.engine.engine_adapter import Conversion, Expected
from ...weight_sync.proof.element_map import Piece, View

Shard = str | int | tuple[int, ...]
"""The name or number of one part of a fused tensor, or the numbers of several consecutive parts."""
ExpertSlot = tuple[str, str, int, str]
"""Of an engine's table of experts: the parameter, the published name, the expert, and which matrix it is."""


class Target(NamedTuple):
    """The served tensor that a published one belongs to."""

    served: str
    part: Shard | list[Shard] | None
    """Which part of a fused tensor, or None if it is the whole. Several parts have the same values."""


class FusedPart(NamedTuple):
    """One part of a fused tensor, along the axis that is sharded."""

    published: int
    """Rows of the whole published part."""
    served: int
    """Rows that each rank serves."""
    replicas: int
    """Number of neighbouring ranks that serve the same rows."""


Parts = Mapping[str | int, FusedPart]
"""The parts of a fused tensor, in their order."""
Arranged = Callable[[View, str | int], View]
"""Returns the rows of one part of a published tensor in the order in which the engine serves them. Its first
axes are the rows, the first of them along the heads.
"""


class Layers(NamedTuple):
    """An engine's classes of layers that are sharded."""

    column: Any
    merged: Any
    """Several matrices on top of each other."""
    qkv: Any
    row: Any
    embedding: Any


class Experts(NamedTuple):
    """How an engine keeps the experts of a layer, which have their matrices in `w13_*` and `w2_*`."""

    table: Callable[[Any], Sequence[ExpertSlot]]
    """The place of each expert's matrix in a layer."""
    rank_and_size: Callable[[Any], tuple[int, int]]
    """The rank of a layer, and the number of ranks that share one expert."""
    up_first: Callable[[Any], bool]
    """Whether a layer has up above gate."""
    stacked: Callable[[Any], Mapping[str, str]]
    """The parameters that are published with all experts in one tensor, by published name."""


class Stacked(NamedTuple):
    """How the tensors are published that have all experts of a layer."""

    exchanged: bool = True
    """As [expert, input, output], and not as engines serve them, [expert, output, input]."""
    alternate: bool = True
    """Rows of gate and up alternate in one that has both; otherwise all rows of gate come first."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a layer does with published tensors that the classes of its modules do not tell."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names below the layer, by published ones."""
    parts: Mapping[str, Parts] = field(default_factory=dict)
    """Of modules with several parts whose class has one, by the name of the module."""
    arranged: Mapping[str, Arranged] = field(default_factory=dict)
    """Of modules whose rows are published in another order, by the name of the module."""
    sharded: Sequence[str] = ()
    """Tensors of the layer itself that ranks divide along the first axis."""
    rank: int = 0
    """Which share of `sharded` this rank has."""
    converted: Mapping[str, Conversion] = field(default_factory=dict)
    """How elements of tensors of the layer itself follow from published ones, if they are no copies."""
    stacked: Stacked | None = None
    """How the experts below the layer are published, if all of them are in one tensor."""


NOTHING = Declared()
Declare = Callable[[torch.nn.Module], Declared]
"""Returns what a layer declares, `NOTHING` for most."""


def rank_and_size(layer: Any) -> tuple[int, int]:
    """Return the rank of a layer that is sharded, and the number of its ranks."""
    if hasattr(layer, "tp_size"):
        return layer.tp_rank, layer.tp_size
    # Newer versions of SGLang keep the group instead, or None for a layer that is not sharded.
    group = layer.tp_group
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)


def parts_of(module: Any, layers: Layers) -> Parts:
    """Return the parts of a column-parallel layer, in their order."""
    size = rank_and_size(module)[1]
    if isinstance(module, layers.qkv):
        replicas = module.num_kv_head_replicas
        return {
            "q": FusedPart(module.total_num_heads * module.head_size, module.num_heads * module.head_size, 1),
            "k": FusedPart(
                module.total_num_kv_heads * module.head_size, module.num_kv_heads * module.head_size, replicas
            ),
            "v": FusedPart(
                module.total_num_kv_heads * module.v_head_size,
                module.num_kv_heads * module.v_head_size,
                replicas,
            ),
        }
    sizes = module.output_sizes if isinstance(module, layers.merged) else [module.output_size]
    return in_order(sizes, size)


def in_order(rows: Sequence[int], size: int) -> Parts:
    """Return parts with these rows, each of which is divided between all ranks."""
    return {index: FusedPart(number, number // size, 1) for index, number in enumerate(rows)}


def place_parts(
    parts: Parts,
    rank: int,
    target: Target,
    shape: tuple[int, ...],
    whole: View,
    axis: int,
    arranged: Arranged | None = None,
) -> Expected | None:
    """Return the pieces of one part of a fused tensor, of all parts if they are published as one."""
    if type(target.part) is int and "q" in parts:
        target = target._replace(part=("q", "k", "v")[target.part])
    several = target.part if isinstance(target.part, tuple) else [target.part]
    chosen: list[Any] = list(parts) if target.part is None else [*several]
    if any(part not in parts for part in chosen):
        return None
    if shape[axis] != sum(parts[part].published for part in chosen):
        return None

    found: list[Piece] = []
    published, source, place = View.whole(shape), 0, 0
    for name, part in parts.items():
        if name in chosen and part.published:
            rows = (
                published.narrow(axis, source, part.published)
                if arranged is None
                else arranged(published, name)
            )
            unit = part.published // rows.shape[axis]  # rows of a head, if they are arranged by heads
            rows = rows.narrow(axis, rank // part.replicas * part.served // unit, part.served // unit)
            axes = rows.shape[axis : axis + 1 + len(rows.shape) - len(shape)]
            served = whole.narrow(axis, place, part.served).split(axis, axes)
            found += [Piece(rows, target.served, served)] if rows.numel else []
            source += part.published
        place += part.served
    return Expected(tuple(found))


def place_rows(
    served: str, shape: tuple[int, ...], whole: View, axis: int, source: int, place: int, length: int
) -> Expected:
    """Return the piece of `length` rows or columns from `source` to `place`."""
    part = View.whole(shape).narrow(axis, source, length)
    return Expected((Piece(part, served, whole.narrow(axis, place, length)),) if part.numel else ())


def require_fresh_products(model: torch.nn.Module) -> None:
    """Raises ProofError if a layer of latent attention computes with other weights than its kv_b_proj has.

    Engines keep both halves of kv_b_proj as separate matrices, as views or as copies.
    """
    for path, module in model.named_modules():
        weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
        for names in PRODUCTS:
            keys, values = (getattr(module, name, None) for name in names)
            if weight is None or keys is None or values is None or weight.dtype.itemsize == 1:
                continue
            halves = weight.detach().view(keys.shape[0], -1, keys.shape[2]).to(keys.dtype)
            size = keys.shape[1]
            fresh = torch.equal(keys, halves[:, :size]), torch.equal(values, halves[:, size:].transpose(1, 2))
            for name, same in zip(names, fresh, strict=True):
                if not same:
                    raise ProofError(
                        f"{path}.{name} does not follow from {path}.kv_b_proj.weight; the engine still "
                        "computes with an older version of it"
                    )


PRODUCTS = (("W_UK_T", "W_UV"), ("w_kc", "w_vc"))
"""What engines call the halves of kv_b_proj: [head, key, latent] and [head, latent, value]."""


def _is_product(module: torch.nn.Module, leaf: str) -> bool:
    return hasattr(module, "kv_b_proj") and any(leaf in names for names in PRODUCTS)


def served_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and persistent buffer that a load is responsible for, aliases included.

    Without what the engine computes from them; see `require_fresh_products`.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        if not _is_product(model.get_submodule(path), leaf):
            yield name, parameter
    for path, module in model.named_modules(remove_duplicate=False):
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        for leaf in module._buffers:
            buffer = module._buffers[leaf]
            if leaf in kept and leaf not in OWN_BUFFERS and buffer is not None:
                yield f"{path}.{leaf}" if path else leaf, buffer


OWN_BUFFERS = {
    # Scales of attention layers, which belong to the KV cache.
    *("_q_scale", "_k_scale", "_v_scale", "_prob_scale"),
    # Which expert is on which rank: persistent in vLLM 0.24, so newer ones may rename them.
    *("_expert_map", "expert_mask"),
    *("expert_global_to_physical", "expert_physical_to_global", "expert_local_to_global"),
}
"""Buffers that the engine computes itself; they belong to no checkpoint."""
