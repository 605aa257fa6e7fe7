# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers with random weights, and the tensors that a trainer publishes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import part_of, published

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
FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    # SGLang has no other embedding of positions for this model on a CPU.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
ENCODER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [1],
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
"""One group of heads, so that all ranks have the same B and C."""
GROUPED = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2},
    "time_step_min": 1e-9,  # transformers has a lower limit on a CPU, and vLLM has none
}
OF_MIXER = {
    "layers_block_type": ["moe", "mamba", "attention"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_latent_size": 64,
}
EYES = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}
Sizes = dict[str, Any]
CONFIGS: dict[str, Callable[[Sizes], Any]] = {
    "qwen2-tied": lambda sizes: transformers.Qwen2Config(**sizes, tie_word_embeddings=True),
    "qwen3-untied": lambda sizes: transformers.Qwen3Config(**sizes, **WIDE_HEADS, tie_word_embeddings=False),
    "llama": lambda sizes: transformers.LlamaConfig(**sizes, **WIDE_HEADS, tie_word_embeddings=False),
    "qwen3-moe": lambda sizes: transformers.Qwen3MoeConfig(
        **sizes, **WIDE_HEADS, **EXPERTS, tie_word_embeddings=False
    ),
    "phi3-fused": lambda sizes: transformers.Phi3Config(**sizes, tie_word_embeddings=False),
    "glm4-fused": lambda sizes: transformers.Glm4Config(**sizes, **WIDE_HEADS, tie_word_embeddings=False),
    "mixtral": lambda sizes: transformers.MixtralConfig(
        **sizes, **WIDE_HEADS, **FEW_EXPERTS, tie_word_embeddings=False
    ),
    "deepseek-v2": lambda sizes: transformers.DeepseekV2Config(**sizes, **LATENT, tie_word_embeddings=False),
    "deepseek-v2-joined": lambda sizes: transformers.DeepseekV2Config(
        **sizes, **(LATENT | {"q_lora_rank": 64}), tie_word_embeddings=False
    ),
    "deepseek-v3": lambda sizes: transformers.DeepseekV3Config(
        **sizes,
        **(LATENT | {"q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
        tie_word_embeddings=False,
    ),
    "gpt-oss": lambda sizes: transformers.GptOssConfig(
        **sizes, **WIDE_HEADS, **FEW_EXPERTS, swiglu_limit=7.0, tie_word_embeddings=False
    ),
    "qwen3-next": lambda sizes: transformers.Qwen3NextConfig(
        **sizes,
        **WIDE_HEADS,
        **EXPERTS,
        **LINEAR,
        shared_expert_intermediate_size=64,
        tie_word_embeddings=False,
    ),
    "qwen3.5": lambda sizes: transformers.Qwen3_5TextConfig(
        **sizes, **WIDE_HEADS, **LINEAR, tie_word_embeddings=False
    ),
    "qwen3.5-moe": lambda sizes: transformers.Qwen3_5MoeConfig(
        text_config={
            **{**sizes, **WIDE_HEADS, **EXPERTS, **LINEAR},
            "shared_expert_intermediate_size": 64,
        },
        vision_config=EYES,
        tie_word_embeddings=False,
    ),
    "llama4": lambda sizes: transformers.Llama4TextConfig(
        **sizes,
        **WIDE_HEADS,
        **(FEW_EXPERTS | {"num_experts_per_tok": 1}),
        intermediate_size_mlp=96,
        tie_word_embeddings=False,
    ),
    "gpt-neox": lambda sizes: transformers.GPTNeoXConfig(
        **{name: size for name, size in sizes.items() if name != "num_key_value_heads"}
    ),
    "falcon-h1": lambda sizes: transformers.FalconH1Config(
        **sizes,
        **MAMBA,
        mamba_d_ssm=256,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        tie_word_embeddings=False,
    ),
    "granite-hybrid": lambda sizes: transformers.GraniteMoeHybridConfig(
        **sizes,
        **MAMBA,
        **FEW_EXPERTS,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=64,
        tie_word_embeddings=False,
    ),
    "nemotron-h": lambda sizes: transformers.NemotronHConfig(
        **{name: size for name, size in sizes.items() if name != "num_hidden_layers"},
        **WIDE_HEADS,
        **GROUPED,
        layers_block_type=["mamba", "attention", "mlp"],
        tie_word_embeddings=False,
    ),
    "nemotron-h-moe": lambda sizes: transformers.NemotronHConfig(
        **{name: size for name, size in sizes.items() if name != "num_hidden_layers"},
        **WIDE_HEADS,
        **GROUPED,
        **OF_MIXER,
        tie_word_embeddings=False,
    ),
    # The CPU kernel of experts has a width of 32 or more on each of two ranks.
    "granite-moe": lambda sizes: transformers.GraniteMoeConfig(
        **(sizes | {"intermediate_size": 128}), **FEW_EXPERTS, tie_word_embeddings=False
    ),
    "mistral": lambda sizes: transformers.MistralConfig(**sizes, **WIDE_HEADS, tie_word_embeddings=False),
    "gemma2": lambda sizes: transformers.Gemma2Config(**sizes, **WIDE_HEADS, query_pre_attn_scalar=32),
    "gemma3": lambda sizes: transformers.Gemma3TextConfig(**sizes, **WIDE_HEADS, query_pre_attn_scalar=32),
    "granite": lambda sizes: transformers.GraniteConfig(**sizes, tie_word_embeddings=False),
    "olmo2": lambda sizes: transformers.Olmo2Config(**sizes, tie_word_embeddings=False),
    "cohere2": lambda sizes: transformers.Cohere2Config(**sizes, **WIDE_HEADS),
    "seed-oss": lambda sizes: transformers.SeedOssConfig(**sizes, **WIDE_HEADS, tie_word_embeddings=False),
    "olmoe": lambda sizes: transformers.OlmoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    ),
    "qwen2-moe": lambda sizes: transformers.Qwen2MoeConfig(
        **sizes, **EXPERTS, shared_expert_intermediate_size=64, tie_word_embeddings=False
    ),
    "phimoe": lambda sizes: transformers.PhimoeConfig(**sizes, **FEW_EXPERTS, tie_word_embeddings=False),
    "glm4-moe": lambda sizes: transformers.Glm4MoeConfig(
        **sizes,
        **WIDE_HEADS,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
    ),
    "qwen2.5-vl": lambda sizes: transformers.Qwen2_5_VLConfig(
        text_config={**sizes, "rope_scaling": {"type": "default", "mrope_section": [4, 6, 6]}},
        vision_config=ENCODER,
        tie_word_embeddings=False,
    ),
}


def make(name: str, folder: Path, **changed: Any) -> Any:
    """Store a model and return it; float32, so that both sides compute the same. `changed`: sizes."""
    torch.manual_seed(0)
    config = CONFIGS[name]({**SIZES, **changed})
    kinds = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
    model = kinds[not hasattr(config, "vision_config")].from_config(config, dtype=torch.float32)
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
        for part in published(part_of(name, tensor), model.config.model_type)
    ]
    return {part.name: part.values for part in parts if part.values is not None}
