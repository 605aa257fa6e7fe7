# SPDX-License-Identifier: Apache-2.0
"""Tiny random models in float32, in the files of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

NUM_EXPERTS = 4
SHARED: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Not the default: a rotary base that is lost on the way shows.
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}


def make(family: str, folder: Path, **sizes: int) -> Path:
    """Write a model of `family` (qwen3, qwen2 with tied embeddings, or qwen3_moe); return its folder.

    `sizes`: fields of its config that differ.
    """
    from tokenizers import Tokenizer, models
    from transformers import (
        AutoModelForCausalLM,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    untied = {"head_dim": 16, "tie_word_embeddings": False}
    experts = {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    configs = {
        "qwen3": lambda: Qwen3Config(**SHARED | untied | sizes),
        "qwen2": lambda: Qwen2Config(**SHARED | {"tie_word_embeddings": True} | sizes),
        "qwen3_moe": lambda: Qwen3MoeConfig(**SHARED | untied | experts | sizes),
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[family](), dtype=torch.float32)
    with torch.no_grad():
        # Norms that differ, and matrices large enough for log-probs far from uniform.
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif "embed" not in name:
                weight.mul_(3)
    path = folder / family
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(model.config.vocab_size)}, unk_token="t1"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t2", unk_token="t1"
    ).save_pretrained(path)
    return path
