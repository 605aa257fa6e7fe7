# SPDX-License-Identifier: Apache-2.0
"""The untrained model: shapes that the engines accept, weights that depend on the seed alone."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.model import ModelSpec, MoeModelSpec, make_model
from recipe.async_pipeline.lab.tasks.tokenizer import VOCAB_SIZE, make_tokenizer


def tiny(*, tied: bool = True) -> ModelSpec:
    return ModelSpec(num_layers=1, hidden_size=32, intermediate_size=32, tied=tied)


@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_a_head_size_without_a_kernel_is_refused(head_dim: int) -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        ModelSpec(head_dim=head_dim, hidden_size=head_dim * 2)


def test_a_width_that_is_no_multiple_of_head_dim_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of head_dim 64"):
        ModelSpec(head_dim=64, hidden_size=96)


@pytest.mark.parametrize("experts", [0, 5])
def test_a_token_visits_some_of_the_experts(experts: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to num_experts=4, got {experts}"):
        MoeModelSpec(experts_per_token=experts)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return make_tokenizer()


@pytest.mark.real_engine
def test_a_mixture_has_its_experts_in_every_layer(tokenizer: Any) -> None:
    spec = MoeModelSpec(num_layers=2, hidden_size=32, intermediate_size=32, expert_size=64)
    model = make_model(spec, tokenizer, seed=0)
    for layer in model.model.layers:
        assert tuple(layer.mlp.experts.down_proj.shape) == (4, 32, 64)
        assert tuple(layer.mlp.gate.weight.shape) == (4, 32)


@pytest.mark.real_engine
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_shares_the_embedding_only_when_tied(tokenizer: Any, tied: bool) -> None:
    model = make_model(tiny(tied=tied), tokenizer, seed=0)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.config.tie_word_embeddings is tied
    assert model.lm_head.weight.shape == (VOCAB_SIZE, 32)


@pytest.mark.real_engine
def test_the_end_and_pad_tokens_reach_both_configs(tokenizer: Any) -> None:
    model = make_model(tiny(), tokenizer, seed=0)
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.real_engine
def test_the_seed_determines_the_weights_and_random_state_is_kept(tokenizer: Any) -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (make_model(tiny(), tokenizer, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
