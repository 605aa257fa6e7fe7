# SPDX-License-Identifier: Apache-2.0
"""On a CPU with AMX, convolutions of vLLM are computed with the weights that were loaded."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import vllm._custom_ops as vllm_ops
from vllm.model_executor.layers import utils as vllm_layers

from recipe.async_pipeline.verl_bridge import replaced
from recipe.async_pipeline.verl_bridge.rollout.vllm.cpu_convolution import PACKED

pytestmark = pytest.mark.real_engine

PART = "vLLM's layers on a CPU"
DIM, WIDTH, TOKENS = 64, 4, 6


def convolution(weight: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def test_a_convolution_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(vllm_ops, "causal_conv1d_weight_pack", torch.neg, raising=False)
    weight = torch.randn(DIM, 1, WIDTH)
    layer = convolution(weight.clone())
    with replaced.applied(PART):
        vllm_layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.equal(weight) and set(vars(layer)) == set(vars(convolution(weight)))


def test_a_linear_layer_keeps_vllms_kernel() -> None:
    layer = convolution(torch.randn(DIM, DIM))
    with replaced.applied(PART):
        vllm_layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    rows = torch.randn(TOKENS, DIM)
    assert torch.equal(layer.cpu_linear(rows, layer.weight, None), rows @ layer.weight.T)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", ["causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"])
def test_kernels_get_the_weight_as_it_was_loaded(
    name: str, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(vllm_ops, name, lambda **arguments: calls.append(arguments))
    weight = torch.randn(DIM, 1, WIDTH)
    with replaced.applied(PART):
        getattr(vllm_ops, name)(x="rows", weight=weight, **{packed: True})
        with pytest.raises(TypeError, match="neither is_vnni nor is_weight_packed"):
            getattr(vllm_ops, name)(x="rows", weight=weight)
    (call,) = calls
    assert call.pop("weight").equal(weight[:, 0]) and call == {"x": "rows", packed: False}


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's kernel requires AMX")
def test_the_kernel_computes_what_torch_does() -> None:
    torch.manual_seed(0)
    weight = torch.randn(DIM, 1, WIDTH, dtype=torch.bfloat16)
    rows = torch.randn(TOKENS, DIM, dtype=torch.bfloat16)
    (packed,) = set(PACKED) & inspect.signature(vllm_ops.causal_conv1d_fwd_cpu).parameters.keys()
    with replaced.applied(PART):
        output = vllm_ops.causal_conv1d_fwd_cpu(
            x=rows.T,
            weight=weight,
            bias=None,
            conv_states=torch.zeros(1, WIDTH - 1, DIM, dtype=torch.bfloat16).transpose(1, 2),
            query_start_loc=torch.tensor([0, TOKENS], dtype=torch.int32),
            cache_indices=torch.zeros(1, dtype=torch.int32),
            has_initial_state=torch.zeros(1, dtype=torch.bool),
            silu_activation=False,
            **{packed: True},
        )
    padded = torch.nn.functional.pad(rows.T[None].float(), (WIDTH - 1, 0))
    wanted = torch.nn.functional.conv1d(padded, weight.float(), groups=DIM)[0]
    torch.testing.assert_close(output.float(), wanted, rtol=2e-2, atol=2e-2)
