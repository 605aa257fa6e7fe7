# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers with random weights, and the tensors that a trainer publishes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import part_of, unfused

# Heads of 32, the smallest that vLLM's CPU kernels have.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE_HEADS = {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2-tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3-untied": lambda: transformers.Qwen3Config(**SIZES, **WIDE_HEADS, tie_word_embeddings=False),
    "llama": lambda: transformers.LlamaConfig(**SIZES, **WIDE_HEADS, tie_word_embeddings=False),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **WIDE_HEADS, **EXPERTS, tie_word_embeddings=False
    ),
    "phi3-fused": lambda: transformers.Phi3Config(**SIZES, tie_word_embeddings=False),
    "glm4-fused": lambda: transformers.Glm4Config(**SIZES, **WIDE_HEADS, tie_word_embeddings=False),
}


def make(name: str, folder: Path) -> Any:
    """Store a model and return it; float32, so that both sides compute the same."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return model


def train(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Change all weights, and return what a trainer publishes of them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    tied = model.config.tie_word_embeddings
    tensors = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    parts = [
        part
        for name, tensor in tensors.items()
        for part in unfused(part_of(name, tensor), model.config.model_type)
    ]
    return {part.name: part.values for part in parts if part.values is not None}
