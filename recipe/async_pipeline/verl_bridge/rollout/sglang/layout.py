# SPDX-License-Identifier: Apache-2.0
"""SGLang's tables of names and shards; see `served_layout.py`. It has no table of experts."""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ..served_layout import Layers, ServedLayout

LAYERS = Layers(
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def served_layout(model: torch.nn.Module) -> ServedLayout:
    """Return the tables of a model of SGLang."""
    return ServedLayout(model, LAYERS, packed_modules(model))


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
