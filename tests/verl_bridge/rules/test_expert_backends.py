# SPDX-License-Identifier: Apache-2.0
"""Experts are served by kernels that leave the published rows in their order."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.verl_bridge.rules.expert_backends import (
    ARGUMENT,
    ROLLOUT,
    check_expert_kernels,
    set_expert_kernels,
)

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128}


def config(
    engine: str,
    device: str = "cuda",
    quantization: str | None = None,
    lora: Any = None,
    **arguments: Any,
) -> Any:
    rollout = {"name": engine, "quantization": quantization, "engine_kwargs": {engine: arguments}}
    role = {"rollout": rollout, "model": {"lora": lora or {}}}
    return OmegaConf.create({"actor_rollout_ref": role, "trainer": {"device": device}})


@pytest.mark.parametrize("engine", ARGUMENT)
@pytest.mark.parametrize("described", [EXPERTS, {"text_config": EXPERTS}])
@pytest.mark.parametrize("chosen", [{}, {"auto": True}])
def test_the_kernels_are_set_with_one_line(engine: str, described: Any, chosen: dict[str, bool]) -> None:
    path = f"{ROLLOUT}.engine_kwargs.{engine}.{ARGUMENT[engine]}"
    of_run = config(engine, **({ARGUMENT[engine]: "auto"} if chosen else {}))
    check_expert_kernels(of_run, described)
    line = set_expert_kernels(of_run, described)
    assert line is not None and line.startswith(f"{path}=triton: ") and "\n" not in line
    assert OmegaConf.select(of_run, path) == "triton"
    assert set_expert_kernels(of_run, described) is None, "it is set already"


@pytest.mark.parametrize(
    ("changes", "described"),
    [
        ({}, {"model_type": "qwen3"}),
        ({}, {"model_type": "gpt_oss", "num_local_experts": 32}),
        ({"device": "cpu"}, EXPERTS),
        ({"quantization": "fp8"}, EXPERTS),
        ({"lora": {"rank": 8}}, EXPERTS),
        ({"lora": {"rank": 8}, "moe_backend": "auto"}, EXPERTS),
        ({"moe_backend": "cutlass"}, EXPERTS),
        ({"moe-backend": "aiter"}, EXPERTS),
    ],
)
def test_other_runs_are_left_alone(changes: dict[str, Any], described: dict[str, Any]) -> None:
    of_run = config("vllm", **changes)
    before = OmegaConf.to_container(of_run)
    check_expert_kernels(of_run, described)
    assert set_expert_kernels(of_run, described) is None
    assert OmegaConf.to_container(of_run) == before


def test_kernels_that_vllm_does_not_read_with_adapters_are_named() -> None:
    of_run = config("vllm", lora={"rank": 8}, moe_backend="flashinfer_trtllm")
    check_expert_kernels(of_run, EXPERTS)
    line = set_expert_kernels(of_run, EXPERTS)
    path = f"{ROLLOUT}.engine_kwargs.vllm.moe_backend"
    assert line == f"{path}=flashinfer_trtllm has no effect with adapters that are not merged"
    assert set_expert_kernels(config("vllm", "cpu", lora={"rank": 8}, moe_backend="triton"), EXPERTS) is None


def test_merged_adapters_are_published_as_weights() -> None:
    line = set_expert_kernels(config("vllm", lora={"rank": 8, "merge": True}), EXPERTS)
    assert line is not None and "moe_backend=triton" in line


@pytest.mark.parametrize(
    ("engine", "key", "value"),
    [
        ("vllm", "moe_backend", "flashinfer_trtllm"),
        ("vllm", "moe-backend", "flashinfer-cutlass"),
        ("sglang", "moe_runner_backend", "flashinfer_trtllm"),
    ],
)
def test_kernels_that_require_reordered_weights_are_refused(engine: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{engine}\.{key} must leave .*got '{value}'.*use triton"):
        check_expert_kernels(config(engine, **{key: value}), EXPERTS)
