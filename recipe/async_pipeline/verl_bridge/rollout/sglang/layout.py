# SPDX-License-Identifier: Apache-2.0
"""SGLang's tables of names, shards and experts; see `served_layout.py`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ..served_layout import EXPERT_NAMES, ServedLayout
from ..served_parts import Experts, ExpertSlot, Layers

LAYERS = Layers(
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def served_layout(model: torch.nn.Module) -> ServedLayout:
    """Return the tables of a model of SGLang."""
    return ServedLayout(model, LAYERS, packed_modules(model), EXPERTS)


def _slots(layer: Any) -> list[ExpertSlot]:
    return [
        slot for names in EXPERT_NAMES for slot in layer.make_expert_params_mapping(*names, layer.num_experts)
    ]


def _stacked(layer: Any) -> dict[str, str]:
    biases = ("gate_up_proj_bias", "down_proj_bias")
    table = layer.make_expert_params_mapping_fused("gate_up_proj", "down_proj", *biases)
    return {
        published.removeprefix("experts."): parameter.removeprefix("experts.")
        for parameter, published, _ in table
    }


EXPERTS = Experts(
    _slots,
    lambda layer: (layer.moe_tp_rank, layer.moe_tp_size),
    lambda layer: bool(getattr(layer.quant_method, "load_up_proj_weight_first", False)),
    _stacked,
)


def packed_modules(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the modules that SGLang fuses, by the name of the fused one, in their order."""
    packed: dict[str, list[str]] = {
        fused: list(parts) for fused, parts in (getattr(model, "packed_modules_mapping", None) or {}).items()
    }
    # Most models say it only for a quantization that loads the parts one by one.
    stacked = getattr(model, "bitsandbytes_stacked_params_mapping", None) or {}
    for part, (fused, _) in sorted(stacked.items(), key=lambda item: item[1][1]):
        parts = packed.setdefault(fused.strip("."), [])
        if part.strip(".") not in parts:
            parts.append(part.strip("."))
    return packed
