# SPDX-License-Identifier: Apache-2.0
"""Options with which SGLang could not be given published weights are refused, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.verl_bridge.rules.sglang_rules import (
    MODEL,
    check_sglang,
    check_sglang_adapters,
    check_sglang_on_cpu,
)
from tests.refusals import Refused, cases_of


def config(**changes: Any) -> Any:
    """A config without any of them; names are paths below `actor_rollout_ref`, with two underscores for a
    dot, or whole.
    """
    made = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {
                    "lora_rank": 0,
                    "lora": {"rank": 0, "merge": False},
                    "target_modules": "all-linear",
                },
                "rollout": {
                    "name": "sglang",
                    "quantization": None,
                    "expert_parallel_size": 1,
                    "tensor_model_parallel_size": 2,
                    "n_gpus_per_node": 4,
                    "engine_kwargs": {"sglang": {}},
                },
            }
        }
    )
    for path, value in changes.items():
        below = path.replace("__", ".").removeprefix("actor_rollout_ref.")
        OmegaConf.update(made, f"actor_rollout_ref.{below}", value, force_add=True)
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout__engine_kwargs__sglang__attention_backend": "fa3"},
        {"rollout__engine_kwargs__sglang__tp_size": 1},
        {"model__lora_rank": 8},
        {"rollout__tensor_model_parallel_size": 4},
    ],
)
def test_what_works_is_accepted(changes: dict[str, Any]) -> None:
    check_sglang(config(**changes))


@cases_of("sglang")
def test_what_does_not_is_refused(case: Refused) -> None:
    case.replay(lambda changes: check_sglang(config(**changes)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            {"intermediate_size": 341},
            "an? intermediate_size that is a multiple of 64 .*_size=2 on the CPU .* 341",
        ),
        ({"moe_intermediate_size": 96}, "a moe_intermediate_size that is a multiple of 64 .* with 96; use"),
        ({"num_key_value_heads": 1}, "a num_key_value_heads that is a multiple of 2 .* with 1; use another"),
    ],
)
def test_a_model_that_sglang_would_pad_on_a_cpu_is_refused(text: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sglang_on_cpu(config(model__path="/model"), text)


def test_a_model_that_sglang_does_not_pad_is_accepted() -> None:
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_key_value_heads": 2}
    check_sglang_on_cpu(config(), sizes)
    check_sglang_on_cpu(config(), {"num_key_value_heads": None})


ADAPTERS = {"model__lora_rank": 8}
OF_EXPERTS = {"num_experts": 4}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (ADAPTERS, {}),
        (ADAPTERS | {"model__target_modules": ["q_proj", "v_proj", "gate_proj"]}, {}),
        (ADAPTERS | {"model__target_modules": ["self_attn.o_proj", "down_proj"]}, {}),
        (ADAPTERS | {"model__lora__merge": True}, OF_EXPERTS),
        ({"model__target_modules": ["k_proj"]}, OF_EXPERTS),
    ],
)
def test_adapters_that_sglang_serves_are_accepted(changes: dict[str, Any], text: dict[str, int]) -> None:
    check_sglang_adapters(config(**changes), text)


@pytest.mark.parametrize(
    ("modules", "text", "message"),
    [
        (
            "all-linear",
            OF_EXPERTS,
            f"{MODEL}.lora.merge must be True with .*=sglang and a mixture .*, got False;",
        ),
        (
            ".*_proj",
            {},
            r"target_modules must be all-linear or a list .*=sglang, got '\.\*_proj'; correct it",
        ),
        (["k_proj"], {}, r"must have q_proj and v_proj if it has k_proj with .*, got \['k_proj'\]; add them"),
        (["q_proj", "k_proj"], {}, "must have v_proj if it has k_proj or q_proj with .*; add it"),
        (["mlp.up_proj"], {}, "must have gate_proj if it has up_proj with .*; add it"),
    ],
)
def test_adapters_that_it_does_not_are_refused(modules: Any, text: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sglang_adapters(config(**ADAPTERS, model__target_modules=modules), text)
