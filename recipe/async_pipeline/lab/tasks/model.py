# SPDX-License-Identifier: Apache-2.0
"""The policy: a Qwen2, Qwen3 or Qwen3-MoE with random weights. An optimizer step takes a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.tokenizer import VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
    )

# The small head sizes for which vLLM's CPU attention has kernels.
HEAD_DIMS = (32, 64)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of the policy."""

    num_layers: int = 2
    """Transformer blocks."""

    hidden_size: int = 128
    """Width of the residual stream; a multiple of head_dim."""

    head_dim: int = 32
    """Width of one attention head: 32 or 64."""

    intermediate_size: int = 512
    """Width of the feed-forward layer."""

    init_std: float = 0.06
    """Standard deviation of the initial weights.

    Qwen2's 0.02 suits wide layers; at this width it doubles the warm-up.
    """

    max_positions: int = 256
    """Longest sequence, prompt and response together, in tokens."""

    tied: bool = True
    """Whether the embedding and the output head share one tensor."""

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(f"model head_dim must be one of {HEAD_DIMS}, got {self.head_dim}")
        if self.hidden_size % self.head_dim:
            raise ConfigError(
                f"model hidden_size must be a multiple of head_dim {self.head_dim}, got {self.hidden_size}"
            )


@dataclass(frozen=True, kw_only=True)
class Qwen3ModelSpec(ModelSpec):
    """Shape of a policy that normalizes its queries and keys."""


@dataclass(frozen=True, kw_only=True)
class MoeModelSpec(ModelSpec):
    """Shape of a policy with a mixture of experts in each layer."""

    num_experts: int = 4
    """Experts of a layer."""

    experts_per_token: int = 2
    """Experts that each token visits."""

    expert_size: int = 256
    """Width of an expert; a multiple of 32, as vLLM's CPU engine requires."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"model experts_per_token must be 1 to num_experts={self.num_experts}, got "
                f"{self.experts_per_token}"
            )


def make_model(
    spec: ModelSpec, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Qwen2ForCausalLM | Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """Build the fp32 policy with weights drawn from `seed`; the caller's random state is preserved."""
    import torch
    from transformers import (
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    if len(tokenizer) != VOCAB_SIZE:
        raise ConfigError(f"tokenizer holds {len(tokenizer)} tokens, the model needs exactly {VOCAB_SIZE}")

    num_heads = spec.hidden_size // spec.head_dim
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": spec.max_positions,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(spec, MoeModelSpec):
            experts = {
                "head_dim": spec.head_dim,
                "num_experts": spec.num_experts,
                "num_experts_per_tok": spec.experts_per_token,
                "moe_intermediate_size": spec.expert_size,
                "norm_topk_prob": True,
            }
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
        elif isinstance(spec, Qwen3ModelSpec):
            model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=spec.head_dim))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**shape))

    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.float()
