# SPDX-License-Identifier: Apache-2.0
"""The contexts of the shim end where they should, and change only what they are for."""

from __future__ import annotations

import pytest
import torch

from recipe.async_pipeline.verl_bridge.workers.megatron.cuda_shim import (
    REPLACED,
    CpuEvent,
    Stream,
    cuda_means_cpu,
    cuda_type_names,
    is_cuda,
)

pytestmark = pytest.mark.real_engine


@pytest.mark.parametrize(
    ("device", "cuda"),
    [
        ("cuda", True),
        ("cuda:1", True),
        (torch.device("cuda", 0), True),
        (0, True),
        ("cpu", False),
        (torch.device("meta"), False),
        (True, False),
    ],
)
def test_is_cuda(device: object, cuda: bool) -> None:
    assert is_cuda(device) is cuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced with CUDA")
def test_cuda_means_the_cpu_inside_the_context_only() -> None:
    with cuda_means_cpu():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device="cuda:0", pin_memory=True).device.type == "cpu"
        assert torch.zeros(2, device="meta").is_meta, "other devices stay"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_types_have_the_names_of_cuda_inside_the_context_only() -> None:
    tensor = torch.zeros(2)
    with cuda_type_names():
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert tensor.type(torch.int32).dtype is torch.int32, "a conversion is still one"
    assert tensor.type() == "torch.FloatTensor"


def test_an_error_ends_the_context_too() -> None:
    with pytest.raises(ValueError), cuda_type_names():
        raise ValueError
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_nothing_is_installed_by_importing_it() -> None:
    assert all(getattr(torch.cuda, name, None) is not value for name, value in REPLACED.items())


def test_streams_and_events_have_ended() -> None:
    assert Stream().query() and Stream().record_event().query() and CpuEvent().elapsed_time(CpuEvent()) == 0.0
