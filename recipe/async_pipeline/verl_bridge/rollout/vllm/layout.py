# SPDX-License-Identifier: Apache-2.0
"""vLLM's tables of names, shards and experts; see `served_layout.py`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ..served_layout import EXPERT_NAMES, ServedLayout
from ..served_parts import Experts, ExpertSlot, Layers
from .declared_layers import declared_by

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
