# SPDX-License-Identifier: Apache-2.0
"""The adapters of a model are counted as peft makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.config.derived.adapters import (
    adapter_rank,
    count_adapter_parameters,
    publishes_adapters,
)
from recipe.async_pipeline.lab.tasks.model import ModelSpec, MoeModelSpec, make_model
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer

pytestmark = pytest.mark.real_engine


@pytest.mark.parametrize(
    ("model", "rank", "alone"),
    [
        ({}, 0, False),
        ({"lora": None, "lora_rank": 4}, 4, True),
        ({"lora": {"rank": 8, "merge": False}, "lora_rank": 0}, 8, True),
        ({"lora": {"rank": 0, "merge": True}, "lora_rank": 8}, 8, False),
    ],
)
def test_merged_adapters_are_not_published_alone(model: dict[str, Any], rank: int, alone: bool) -> None:
    config = {"actor_rollout_ref": {"model": model}}
    assert (adapter_rank(config), publishes_adapters(config)) == (rank, alone)


@pytest.mark.parametrize("spec", [ModelSpec(num_layers=1), ModelSpec(num_layers=1, tied=False)])
@pytest.mark.parametrize(
    ("targets", "excluded"),
    [
        ("all-linear", None),
        ("all-linear", ["o_proj"]),
        (["q_proj", "self_attn.v_proj"], None),
        (r".*\.layers\.0\..*_proj", r".*\.k_proj"),
    ],
)
def test_as_many_parameters_as_peft_makes(
    tmp_path: Path, spec: ModelSpec, targets: Any, excluded: Any
) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    model = make_model(spec, make_tokenizer(), 0)
    model.save_pretrained(tmp_path)
    chosen = LoraConfig(r=4, target_modules=targets, exclude_modules=excluded, task_type="CAUSAL_LM")
    adapters = get_peft_model_state_dict(get_peft_model(model, chosen))
    made = sum(tensor.numel() for tensor in adapters.values())
    assert made > 0
    assert count_adapter_parameters(tmp_path, 4, targets, excluded) == made


def test_adapters_of_experts_are_not_counted(tmp_path: Path) -> None:
    make_model(MoeModelSpec(num_layers=1), make_tokenizer(), 0).save_pretrained(tmp_path)
    assert count_adapter_parameters(tmp_path, 4, "all-linear") is None


def test_a_model_on_another_machine_has_no_size(tmp_path: Path) -> None:
    assert count_adapter_parameters(tmp_path / "nowhere", 4, "all-linear") is None
