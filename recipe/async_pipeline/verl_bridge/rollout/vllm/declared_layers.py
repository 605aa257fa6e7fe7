# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM whose loaders reorder, rename or compute what they copy.

Written from what the layers compute, not from their loaders. The classes are known by name, so that no model
is imported that is not served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....weight_sync.proof.element_map import View
from ..served_parts import NOTHING, Declared, FusedPart, Stacked, in_order, rank_and_size


def declared_by(layer: torch.nn.Module) -> Declared:
    """Return what a layer declares; see `Declared`."""
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
