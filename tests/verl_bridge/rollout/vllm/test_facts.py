# SPDX-License-Identifier: Apache-2.0
"""An engine tells which of vLLM's paths it has taken."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge.rollout.vllm.facts import engine_facts, engine_line


class Layer:
    attn_backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")


class Attention(Enum):
    TORCH_SDPA = "path.of.its.class"


class VisionLayer:
    attn_backend = Attention.TORCH_SDPA


class Executor:
    pass


def worker(executor: Any = "mp", **of_runner: Any) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
        model_config=SimpleNamespace(enforce_eager=False),
    )
    model = SimpleNamespace(modules=lambda: [Layer(), object(), Layer()])
    return SimpleNamespace(model_runner=SimpleNamespace(model=model, **of_runner), vllm_config=config)


@pytest.mark.parametrize(("kept", "runner"), [("input_batch", "V1"), ("req_states", "V2")])
def test_the_runner_is_known_by_its_states(kept: str, runner: str) -> None:
    facts = engine_facts(worker(**{kept: object()}))
    assert facts == {
        "model runner": f"{runner} (types.SimpleNamespace)",
        "attention": "FLASH_ATTN",
        "executor": "mp",
        "CUDA graphs": "on",
    }
    assert engine_line("0.24.0", facts).startswith(f"engine: vLLM 0.24.0, model runner {runner} (types.")


def test_an_executor_may_be_a_class() -> None:
    assert engine_facts(worker(Executor))["executor"] == "Executor"
    assert engine_facts(worker(f"{__name__}.Executor"))["executor"] == f"{__name__}.Executor"


def test_a_vision_tower_has_a_member_of_an_enumeration() -> None:
    seeing = worker(input_batch=object())
    seeing.model_runner.model.modules = lambda: [Layer(), VisionLayer()]
    assert engine_facts(seeing)["attention"] == "FLASH_ATTN, TORCH_SDPA"
