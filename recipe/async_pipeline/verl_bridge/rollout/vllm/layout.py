# SPDX-License-Identifier: Apache-2.0
"""vLLM's tables of names, shards and experts; see `served_layout.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ....weight_sync.proof.element_map import View
from ..served_layout import EXPERT_NAMES, ServedLayout
from ..served_parts import (
    NOTHING,
    Declared,
    Experts,
    ExpertSlot,
    FusedPart,
    Layers,
    Stacked,
    in_order,
    rank_and_size,
)


def declared_by(layer: torch.nn.Module) -> Declared:
    """Return what a layer declares; see `Declared`.

    Written from what the layers compute, not from their loaders. The classes are known by name, so that no
    model is imported that is not served.
    """
    for kind in type(layer).__mro__:
        if kind.__name__ in DECLARED:
            return DECLARED[kind.__name__](layer)
    return NOTHING


STACKED = {"experts.gate_up_proj": "experts.w13_weight", "experts.down_proj": "experts.w2_weight"}
"""Tensors with all experts of a layer, by published name."""


def _delta_net(layer: Any) -> Declared:
    """Its convolution has channels for queries, keys and values."""
    rank, size = rank_and_size(layer.conv1d)
    channels = in_order([layer.key_dim, layer.key_dim, layer.value_dim], size)
    return Declared(parts={"conv1d": channels}, sharded=("A_log", "dt_bias"), rank=rank)


def _mamba(layer: Any) -> Declared:
    """All ranks have the same B and C if its heads are one group; otherwise its modules' classes tell."""
    rank, size = rank_and_size(layer.conv1d)
    inner, heads = (FusedPart(rows, rows // size, 1) for rows in (layer.intermediate_size, layer.num_heads))
    shared = FusedPart(layer.ssm_state_size, layer.ssm_state_size, size)
    grouped = hasattr(layer.conv1d, "output_sizes")
    channels = [inner, shared, shared]
    return Declared(
        renamed={"A_log": "A"},
        parts={}
        if grouped
        else {
            "conv1d": dict(enumerate(channels)),
            "in_proj": dict(enumerate([inner, *channels, heads])),
        },
        sharded=("A", "D", "dt_bias"),
        rank=rank,
        converted={"A": _decay},
    )


def _decay(logarithm: torch.Tensor) -> torch.Tensor:
    return -torch.exp(logarithm)


def _norm_of_mamba(layer: Any) -> Declared:
    return Declared(sharded=("weight",), rank=rank_and_size(layer)[0])


def _llama4_attention(layer: Any) -> Declared:
    """It rotates the halves of queries and keys, which are published as pairs."""

    def arranged(published: View, part: str | int) -> View:
        if part == "v":
            return published
        pairs = layer.head_dim // 2
        return published.split(0, (published.shape[0] // layer.head_dim, pairs, 2)).exchanged(1, 2)

    return Declared(arranged={"qkv_proj": arranged})


def _gpt_neox_attention(layer: Any) -> Declared:
    """Queries, keys and values are published head by head."""

    def arranged(published: View, part: str | int) -> View:
        heads = published.split(0, (layer.total_num_heads, 3, layer.head_size))
        return heads.select(1, "qkv".index(str(part)))

    return Declared(arranged={"query_key_value": arranged})


def _llama4_experts(layer: Any) -> Declared:
    return Declared(renamed=STACKED, stacked=Stacked(alternate=False))


def _granite_experts(layer: Any) -> Declared:
    return Declared(
        renamed={
            **STACKED,  # vLLM 0.32 maps the names to these
            "input_linear.weight": "experts.w13_weight",
            "output_linear.weight": "experts.w2_weight",
            "router.layer.weight": "gate.weight",
        },
        stacked=Stacked(exchanged=False, alternate=False),
    )


DECLARED: Mapping[str, Callable[[Any], Declared]] = {
    "QwenGatedDeltaNetAttention": _delta_net,
    "MambaMixer2": _mamba,
    "Mixer2RMSNormGated": _norm_of_mamba,
    "Llama4Attention": _llama4_attention,
    "GPTNeoXAttention": _gpt_neox_attention,
    "Llama4MoE": _llama4_experts,
    "GraniteMoeMoE": _granite_experts,
}
"""By the name of the class."""


LAYERS = Layers(
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def served_layout(model: torch.nn.Module) -> ServedLayout:
    """Return the tables of a model of vLLM."""
    packed = getattr(model, "packed_modules_mapping", None) or {}
    experts = Experts(
        lambda layer: _slots(model, layer), _rank_and_size, lambda layer: False, lambda layer: {}
    )
    return ServedLayout(model, LAYERS, packed, experts, declared_by)


def _slots(model: torch.nn.Module, layer: Any) -> list[ExpertSlot]:
    if hasattr(layer, "get_expert_mapping"):
        of_layer: list[ExpertSlot] = layer.get_expert_mapping()
        return of_layer
    experts = layer.moe_config.num_logical_experts
    redundant = layer.moe_config.num_experts - experts
    return [
        slot
        for names in EXPERT_NAMES
        for slot in layer.make_expert_params_mapping(model, *names, experts, redundant)
    ]


def _rank_and_size(layer: Any) -> tuple[int, int]:
    parallel = layer.moe_config.moe_parallel_config
    return parallel.tp_rank, parallel.tp_size
