# SPDX-License-Identifier: Apache-2.0
"""vLLM's tables of names, shards and experts; see `served_layout.py`."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ..served_layout import Layers, ServedLayout

LAYERS = Layers(
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def served_layout(model: torch.nn.Module) -> ServedLayout:
    """Return the tables of a model of vLLM."""
    return ServedLayout(model, LAYERS, getattr(model, "packed_modules_mapping", None) or {})
