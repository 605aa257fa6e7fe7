# SPDX-License-Identifier: Apache-2.0
"""Packed sequences train as with transformers' sdpa and verl's log-probs, without a mask over all pairs."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.torch_functional import logprobs_from_logits_v2 as verls_log_probs

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.verl_bridge.workers.attention import INSTEAD

pytestmark = pytest.mark.real_engine

LENGTHS = (5, 1, 17, 9)
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MODELS = [("qwen2", {}), ("qwen3", {}), ("llama", {}), ("qwen2", WINDOW)]
IDS = ["qwen2", "qwen3", "llama", "windows"]
TORCHS = torch.nn.functional.scaled_dot_product_attention


def tiny(kind: str, changes: dict[str, Any], attention: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        **changes,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def packed() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": torch.randint(0, 97, positions.shape), "position_ids": positions}


def trained(model: Any, log_probs: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return logits, log-probs, and gradients of a mean over tokens, as losses are."""
    logits = model(**inputs, use_cache=False).logits
    labels = inputs["input_ids"].roll(-1, 1)
    of_labels = log_probs(logits, labels)
    of_labels.sin().mean().backward()
    return [logits, of_labels, *(parameter.grad for parameter in model.parameters())]


@pytest.fixture
def attention(module: ModuleType) -> ModuleType:
    module.register_attention()
    return module


def varlen_of_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, *sizes: Any, **how: Any
) -> torch.Tensor:
    """Compute what torch's kernel is documented to compute."""
    assert bounds is sizes[0] and bounds.dtype == torch.int32 and how["enable_gqa"]
    left, right = how["window_size"]
    assert set(sizes[1:]) == {max(LENGTHS)} and right == 0
    outputs = []
    for begin, end in pairwise(bounds.tolist()):
        pairs = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        pairs = pairs if left < 0 else pairs.triu(-left)
        part = (tensor[begin:end].transpose(0, 1)[None] for tensor in (query, key, value))
        outputs.append(TORCHS(*part, attn_mask=pairs, scale=how["scale"], enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("kernel", [False, True], ids=["cpu", "kernel"])
@pytest.mark.parametrize(("kind", "changes"), MODELS, ids=IDS)
def test_logits_and_gradients_are_the_same(
    attention: ModuleType,
    kind: str,
    changes: dict[str, Any],
    kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = trained(tiny(kind, changes, "sdpa"), verls_log_probs, packed())
    if kernel:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_of_rows)
        monkeypatch.setattr(attention, "_kernel_dtype", lambda *_: torch.float32)
    ours = trained(tiny(kind, changes, INSTEAD), attention.log_probs_of, packed())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "changes"), MODELS, ids=IDS)
def test_sequences_do_not_see_each_other(attention: ModuleType, kind: str, changes: dict[str, Any]) -> None:
    model, inputs = tiny(kind, changes, INSTEAD), packed()
    alone = [model(one, use_cache=False).logits for one in inputs["input_ids"].split(LENGTHS, 1)]
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, torch.cat(alone, 1))


@pytest.mark.parametrize(("kind", "changes"), MODELS, ids=IDS)
def test_no_mask_has_all_pairs(
    attention: ModuleType, kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(query: Any, key: Any, value: Any, attn_mask: Any, **others: Any) -> Any:
        sizes.append(0 if attn_mask is None else attn_mask.numel())
        assert query.shape[2] <= max(LENGTHS)
        return TORCHS(query, key, value, attn_mask=attn_mask, **others)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    tiny(kind, changes, INSTEAD)(**packed(), use_cache=False)
    window = changes.get("sliding_window", 0)
    assert max(sizes) <= window * 2 * window


def test_a_padded_batch_is_computed_as_by_sdpa(attention: ModuleType) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    inputs = {"input_ids": torch.randint(0, 97, (2, 5)), "attention_mask": mask}
    ours, theirs = (trained(tiny("qwen2", {}, name), verls_log_probs, inputs) for name in (INSTEAD, "sdpa"))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_scores_that_a_model_limits_are_refused(attention: ModuleType) -> None:
    with pytest.raises(ConfigError, match="packed_sdpa cannot train a model with softcap"):
        tiny("gemma2", {}, INSTEAD)(**packed(), use_cache=False)


def test_a_model_that_cannot_use_sdpa_is_refused(attention: ModuleType) -> None:
    with pytest.raises(ValueError, match="does not support an attention implementation through torch"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss"), attn_implementation=INSTEAD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_float32_in_chunks(
    module: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 3 * 11)
    logits = torch.randn(2, 4, 11).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (2, 4))
    reference = logits.detach().double().requires_grad_()
    exact = torch.log_softmax(reference, -1).gather(-1, labels[..., None])[..., 0]
    ours = module.log_probs_of(logits, labels)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-6)
    ours.sin().sum().backward()
    exact.sin().sum().backward()
    assert logits.grad is not None and reference.grad is not None
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(logits.grad, reference.grad.to(dtype), rtol=rounding, atol=1e-6)
