# SPDX-License-Identifier: Apache-2.0
"""FSDP trains with an attention that is right for the model; without flash-attn, with torch's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.async_pipeline.errors import ConfigError
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine

ATTENTION = "override_config.attn_implementation"
ACTOR, CRITIC = (f"{model}.{ATTENTION}" for model in ("actor_rollout_ref.model", "critic.model"))
SIZE = "ulysses_sequence_parallel_size"
ULYSSES, FSDP_ULYSSES = f"actor_rollout_ref.actor.{SIZE}", f"actor_rollout_ref.actor.fsdp_config.{SIZE}"
OF_REF, OF_CRITIC = f"actor_rollout_ref.ref.fsdp_config.{SIZE}", f"critic.fsdp.{SIZE}"
EVERY_ROLE = {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True}
SIZES = {ULYSSES: ACTOR, FSDP_ULYSSES: ACTOR, OF_REF: ACTOR, OF_CRITIC: CRITIC}
"""Each key that divides sequences, and the attention that computes them."""
LIMITED = {"model_type": "gemma2", "attn_logit_softcapping": 50.0}
UNSET = {"trainer.device": "cuda", ACTOR: None, CRITIC: None}
Describe = Callable[[dict[str, Any]], None]


@pytest.fixture
def describe(tmp_path: Path) -> Describe:
    """Return a function that adds to the `config.json` of the smoke configuration's models."""

    def add(described: dict[str, Any]) -> None:
        file = tmp_path / "task" / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | described))

    return add


def chosen(config: DictConfig) -> tuple[Any, Any]:
    return OmegaConf.select(config, ACTOR), OmegaConf.select(config, CRITIC)


def test_a_run_gets_torchs_with_one_line(launch: ModuleType, smoke: Smoke) -> None:
    config = smoke(UNSET)
    notes = launch.set_verls_keys(config, launch.checked(config), ())
    (line,) = (note for note in notes if ATTENTION in note)
    assert line.startswith(f"{ACTOR}=packed_sdpa: flash-attn is not installed here; ") and "\n" not in line
    assert chosen(config) == ("packed_sdpa", None), "this run has no critic"


def test_a_critic_gets_it_too(module: ModuleType, smoke: Smoke) -> None:
    config = smoke(UNSET | EVERY_ROLE)
    assert len(module.set_attention(config)) == 1
    assert chosen(config) == ("packed_sdpa", "packed_sdpa")


@pytest.mark.parametrize(
    "changes",
    [
        {ACTOR: "sdpa"},
        {"trainer.device": "cpu"},
        {"actor_rollout_ref.actor.strategy": "megatron", "actor_rollout_ref.ref.strategy": "megatron"},
    ],
    ids=["chosen", "cpu", "megatron"],
)
def test_other_runs_are_left_alone(module: ModuleType, smoke: Smoke, changes: dict[str, Any]) -> None:
    config = smoke(UNSET | changes)
    assert module.set_attention(config) == []
    assert chosen(config) == (changes.get(ACTOR), None)


@pytest.mark.parametrize(
    ("changes", "described", "user"),
    [
        *(({path: 2}, {}, f"{path}=2") for path in SIZES),
        ({}, {"vision_config": {}}, "a model of pictures"),
        ({}, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({ACTOR: "sdpa"}, {"vision_config": {}, "model_type": "qwen2_5_vl"}, "a model of pictures"),
        ({ACTOR: "packed_sdpa"}, {"vision_config": {}, "model_type": "glm4v"}, "a model of pictures"),
        ({ACTOR: "flash_attention_2"}, {}, f"{ACTOR}=flash_attention_2"),
        ({ACTOR: "sdpa", CRITIC: "flash_attention_2"}, {}, f"{CRITIC}=flash_attention_2"),
    ],
)
def test_what_needs_flash_attention_is_named(
    module: ModuleType,
    smoke: Smoke,
    describe: Describe,
    changes: dict[str, Any],
    described: dict[str, Any],
    user: str,
) -> None:
    describe(described)
    config = smoke(UNSET | EVERY_ROLE | changes)
    line = module.set_attention(config)[0]
    assert line.startswith(f"{user} requires flash-attn to train") and "\n" not in line
    assert chosen(config) == (changes.get(ACTOR), changes.get(CRITIC))


def test_newer_flash_attention_needs_its_own_package(module: ModuleType, smoke: Smoke) -> None:
    (line,) = module.set_attention(smoke(UNSET | {ACTOR: "flash_attention_3"}))
    assert line == (
        f"{ACTOR}=flash_attention_3 requires flash-attn-3 to train; it is not installed here: install it on "
        f"the nodes, or set {ACTOR}=packed_sdpa"
    )


def test_flash_attention_is_used_where_it_is_installed(
    module: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    config = smoke(UNSET)
    assert module.set_attention(config) == []
    assert chosen(config) == (None, None)


@pytest.mark.parametrize("attention", ["sdpa", "packed_sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("path", SIZES)
def test_divided_sequences_are_refused_where_heads_are_not_exchanged(
    launch: ModuleType, smoke: Smoke, path: str, device: str, attention: str
) -> None:
    changes = EVERY_ROLE | {"trainer.device": device, ACTOR: attention, CRITIC: attention, path: 2}
    with pytest.raises(ConfigError) as refused:
        launch.checked(smoke(changes))
    start = f"{path} must be 1 with {SIZES[path]}={attention}, "
    assert any(line.startswith(start) and ", got 2; " in line for line in refused.value.problems)


@pytest.mark.parametrize("attention", [None, "flash_attention_2", "kernels-community/flash-attn"])
def test_divided_sequences_are_accepted_with_flash_attention(
    module: ModuleType, smoke: Smoke, attention: str | None
) -> None:
    attentions = {ACTOR: attention, CRITIC: attention}
    module.check_attention(smoke(UNSET | EVERY_ROLE | attentions | dict.fromkeys(SIZES, 2)))


def test_sizes_of_roles_that_do_not_run_are_not_read(module: ModuleType, smoke: Smoke) -> None:
    unused = {OF_REF: 2, OF_CRITIC: 2, "critic.enable": False, "algorithm.use_kl_in_reward": False}
    module.check_attention(smoke(unused | {"actor_rollout_ref.actor.use_kl_loss": False}))


def test_divided_sequences_of_linear_attention_are_refused(
    module: ModuleType, smoke: Smoke, describe: Describe
) -> None:
    config = smoke(UNSET | {ULYSSES: 2})
    describe({"model_type": "qwen3_next", "linear_conv_kernel_dim": 4})
    with pytest.raises(ConfigError, match=f"^{ULYSSES} must be 1 for a model with linear attention"):
        module.check_attention(config)
    describe({"model_type": "qwen3_5"})
    module.check_attention(config)


@pytest.mark.parametrize(("attention", "right"), [("sdpa", False), ("packed_sdpa", False), ("eager", True)])
def test_an_attention_that_ignores_the_limit_of_scores_is_refused(
    module: ModuleType, smoke: Smoke, describe: Describe, attention: str, right: bool
) -> None:
    config = smoke({ACTOR: attention})
    for described in (LIMITED, {"text_config": LIMITED}):
        describe(described)
        if right:
            module.check_attention(config)
            continue
        wrong = f"^{ACTOR} must be .* attn_logit_softcapping=50.0, .* got '{attention}'; set it$"
        with pytest.raises(ConfigError, match=wrong):
            module.check_attention(config)
