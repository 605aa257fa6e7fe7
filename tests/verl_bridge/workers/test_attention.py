# SPDX-License-Identifier: Apache-2.0
"""Without flash-attn, FSDP trains text with torch's attention."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine

ATTENTION = "override_config.attn_implementation"
ACTOR, CRITIC = (f"{model}.{ATTENTION}" for model in ("actor_rollout_ref.model", "critic.model"))
ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
FSDP_ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
UNSET = {"trainer.device": "cuda", ACTOR: None, CRITIC: None}


def chosen(config: DictConfig) -> tuple[Any, Any]:
    return OmegaConf.select(config, ACTOR), OmegaConf.select(config, CRITIC)


def test_a_run_gets_torchs_with_one_line(launch: ModuleType, smoke: Smoke) -> None:
    config = smoke(UNSET)
    notes = launch.set_verls_keys(config, launch.checked(config), ())
    (line,) = (note for note in notes if ATTENTION in note)
    assert line.startswith(f"{ACTOR}=packed_sdpa: flash-attn is not installed here; ") and "\n" not in line
    assert chosen(config) == ("packed_sdpa", None), "this run has no critic"


def test_a_critic_gets_it_too(module: ModuleType, smoke: Smoke) -> None:
    config = smoke(UNSET | {"algorithm.adv_estimator": "gae"})
    assert module.set_attention(config, {}) is not None
    assert chosen(config) == ("packed_sdpa", "packed_sdpa")


@pytest.mark.parametrize(
    ("changes", "described"),
    [
        ({ACTOR: "flash_attention_3"}, {}),
        ({"trainer.device": "cpu"}, {}),
        ({"actor_rollout_ref.actor.strategy": "megatron"}, {}),
    ],
    ids=["chosen", "cpu", "megatron"],
)
def test_other_runs_are_left_alone(
    module: ModuleType, smoke: Smoke, changes: dict[str, Any], described: dict[str, Any]
) -> None:
    config = smoke(UNSET | changes)
    assert module.set_attention(config, described) is None
    assert chosen(config) == (changes.get(ACTOR), None)


@pytest.mark.parametrize(
    ("changes", "described", "user"),
    [
        ({ULYSSES: 2}, {}, f"{ULYSSES}=2"),
        ({FSDP_ULYSSES: 2}, {}, f"{FSDP_ULYSSES}=2"),
        ({}, {"vision_config": {}}, "a model of pictures"),
        ({}, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ],
    ids=["ulysses", "fsdp-ulysses", "pictures", "limited-scores"],
)
def test_what_needs_flash_attention_is_named(
    module: ModuleType, smoke: Smoke, changes: dict[str, Any], described: dict[str, Any], user: str
) -> None:
    config = smoke(UNSET | changes)
    line = module.set_attention(config, described)
    assert line.startswith(f"{user} requires flash-attn to train") and "\n" not in line
    assert chosen(config) == (None, None)


def test_flash_attention_is_used_where_it_is_installed(
    module: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    config = smoke(UNSET)
    assert module.set_attention(config, {}) is None
    assert chosen(config) == (None, None)
