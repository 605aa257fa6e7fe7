# SPDX-License-Identifier: Apache-2.0
"""Keys that nothing reads are named if the user sets them."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.keys.without_effect import (
    WITHOUT_EFFECT,
    profiling_off,
    unmet,
    why_without_effect,
    without_effect,
)
from recipe.async_pipeline.config.paths import nested

ACTOR = "actor_rollout_ref.actor"
DEFAULTS = {
    "trainer.balance_batch": True,
    "trainer.nnodes": 1,
    "critic.profiler.ranks": [],
    "critic.profiler.save_path": "${oc.select:global_profiler.save_path,null}",
}


def named(values: dict[str, Any]) -> list[str]:
    return [*without_effect(nested(values), [nested(DEFAULTS)])]


def test_a_key_without_effect_is_named_with_the_reason() -> None:
    (line,) = named({"trainer.balance_batch": False, "trainer.nnodes": 2})
    why = "verl's V1 trainer balances each batch"
    assert line == f"trainer.balance_batch has no effect in a pipeline run: {why}; leave it out"


def test_each_key_of_a_section_is_named() -> None:
    lines = named({"critic.profiler.ranks": [0], "critic.profiler.save_path": "traces"})
    assert [line.partition(" ")[0] for line in lines] == [
        "critic.profiler.ranks",
        "critic.profiler.save_path",
    ]


@pytest.mark.parametrize(
    "values",
    [
        DEFAULTS,
        {"critic.profiler.save_path": "${oc.select:global_profiler.save_path, null}"},
        {"critic.profiler.own": 1, "trainer.nnodes": 2},
    ],
)
def test_defaults_and_other_keys_are_not_named(values: dict[str, Any]) -> None:
    assert named(values) == []


def test_the_value_of_any_of_verls_configurations_is_a_default() -> None:
    key = "trainer.balance_batch"
    assert not [*without_effect(nested({key: False}), [nested({key: True}), nested({key: False})])]


@pytest.mark.parametrize(
    "path",
    [
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile",
        "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params",
        "data.use_shm",
    ],
)
def test_a_key_that_verl_reads_has_no_row(path: str) -> None:
    assert why_without_effect(path) is None


def test_a_key_that_only_begins_like_one_is_another() -> None:
    assert why_without_effect("skip.rollout.enable") and why_without_effect("skip.rollout_tq.enable") is None


@pytest.mark.parametrize(
    ("paths", "config", "without"),
    [
        (["critic.ppo_epochs", "critic.optim.lr"], {}, "critic.enable=True or algorithm.adv_estimator=gae"),
        (["critic.ppo_epochs"], {"critic.enable": True}, ""),
        (["critic.ppo_epochs"], {"algorithm.adv_estimator": "gae"}, ""),
        (["critic.enable", "trainer.nnodes"], {"critic.enable": False}, ""),
        (["critic.profiler.ranks"], {}, ""),
        (
            ["actor_rollout_ref.model.lora_alpha"],
            {"actor_rollout_ref.model.lora_rank": 0},
            "actor_rollout_ref.model.lora_rank above 0",
        ),
        (["actor_rollout_ref.model.lora_alpha"], {"actor_rollout_ref.model.lora_rank": 8}, ""),
        (
            ["algorithm.gamma"],
            {"algorithm.adv_estimator": "grpo"},
            "algorithm.adv_estimator=gae or algorithm.adv_estimator=reinforce_plus_plus",
        ),
        (["algorithm.gamma"], {"algorithm.adv_estimator": "reinforce_plus_plus"}, ""),
        (
            ["algorithm.norm_adv_by_std_in_grpo"],
            {"algorithm.adv_estimator": "rloo"},
            " or ".join(f"algorithm.adv_estimator={one}" for one in ("grpo", "grpo_passk", "grpo_process")),
        ),
        (["algorithm.norm_adv_by_std_in_grpo"], {"algorithm.adv_estimator": "grpo"}, ""),
        (
            [f"{ACTOR}.fsdp_config.use_orig_params", f"{ACTOR}.fsdp_config.wrap_policy.min_num_params"],
            {f"{ACTOR}.strategy": "fsdp2"},
            f"{ACTOR}.strategy=fsdp",
        ),
        ([f"{ACTOR}.fsdp_config.use_orig_params"], {f"{ACTOR}.strategy": "fsdp"}, ""),
        (
            ["critic.fsdp.use_orig_params"],
            {"critic.enable": True, "critic.strategy": "fsdp2"},
            "critic.strategy=fsdp",
        ),
        (
            [f"{ACTOR}.policy_loss.dro_beta"],
            {f"{ACTOR}.policy_loss.loss_mode": "vanilla"},
            f"{ACTOR}.policy_loss.loss_mode=dro",
        ),
        (
            ["algorithm.kl_ctrl.kl_coef"],
            {"algorithm.use_kl_in_reward": False},
            "algorithm.use_kl_in_reward=True",
        ),
    ],
)
def test_a_key_whose_condition_is_not_met_is_named(
    paths: list[str], config: dict[str, Any], without: str
) -> None:
    verb = "have" if len(paths) > 1 else "has"
    expected = [f"{', '.join(paths)} {verb} no effect without {without}"] if without else []
    assert [*unmet(paths, config.get)] == expected


def test_no_worker_starts_under_a_profiler() -> None:
    given = {
        "global_profiler.steps": [1, 2],
        "global_profiler.tool": "nsys",
        "global_profiler.save_path": "traces",
        "critic.profiler.enable": True,
        "critic.profiler.tool": "${oc.select:global_profiler.tool,null}",
        "actor_rollout_ref.actor.profiler.enable": False,
        "trainer.tool": "mine",
    }
    assert profiling_off(nested(given)) == {
        "global_profiler.steps": None,
        "global_profiler.tool": None,
        "critic.profiler.enable": False,
    }


def test_every_key_has_a_reason() -> None:
    assert all(why and not why.endswith(".") for why in WITHOUT_EFFECT.values())
