# SPDX-License-Identifier: Apache-2.0
"""rLLM's own keys become knobs; verl's stay as they are."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.paths import OWN, nested
from recipe.async_pipeline.tools.translate.rllm import SHARED, translate_rllm


def test_its_keys_and_verls() -> None:
    found = translate_rllm(
        {
            "rllm": {
                "agent": {"max_steps": 12, "trajectory_timeout": 300, "engine_args": {"a": 1}},
                "gateway": {"port": 9090},
                "rejection_sample": {"enable": True},
            },
            "async_training": {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 2},
            "actor_rollout_ref": {"rollout": {"n": 4}},
            "fancy": 1,
        }
    )
    assert found.overrides == {
        "+async_pipeline": True,
        f"+{OWN}.agentic.max_turns": 12,
        f"+{OWN}.agentic.episode_timeout_s": 300.0,
        "algorithm.filter_groups.enable": True,
        "+async_training.staleness_threshold": 0.5,
        "+async_training.trigger_parameter_sync_step": 2,
        "actor_rollout_ref.rollout.n": 4,
    }
    assert found.unknown == ["fancy"]
    by_hand = [one.key for one in found.keys if one.outcome.kind == "by hand"]
    assert by_hand == ["rllm.agent.engine_args.a", "rllm.gateway.port"]


def test_its_lake_is_this_packages() -> None:
    lake = {"name": "frozenlake", "env_args": {"size": 8, "p": 0.7, "is_slippery": False, "max_steps": 5}}
    found = translate_rllm({"rllm": {"env": lake}})
    assert found.overrides == {
        "+async_pipeline": True,
        f"+{OWN}.agentic.environment": "frozen_lake",
        f"+{OWN}.agentic.environment_kwargs.size": 8,
        f"+{OWN}.agentic.environment_kwargs.frozen": 0.7,
        f"+{OWN}.agentic.environment_kwargs.slippery": False,
    }
    assert found.keys[-1].outcome.kind == "by hand"
    other = translate_rllm({"rllm": {"env": {"name": "mine:C", "env_args": {"size": 8}}}})
    assert other.overrides == {"+async_pipeline": True, f"+{OWN}.agentic.environment": "mine:C"}


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def document(**values: Any) -> dict[str, Any]:
    return nested({path.replace("__", "."): value for path, value in values.items()})


def test_a_default_of_rllm_gives_way_to_verls_key() -> None:
    found = translate_rllm(document(rllm__data__train_batch_size=64, data__train_batch_size=32))
    assert found.overrides["data.train_batch_size"] == 32 and found.unsupported == []
    found = translate_rllm(document(rllm__data__train_batch_size=16, data__train_batch_size=32))
    assert found.overrides["data.train_batch_size"] == 16 and found.unsupported == []
    found = translate_rllm(document(rllm__data__train_batch_size=64))
    assert found.overrides["data.train_batch_size"] == 64


def test_every_shared_value_can_be_in_both_places() -> None:
    for shared in SHARED:
        for rllms, verls in ((shared.default, "other"), ("other", "another")):
            found = translate_rllm(nested({shared.rllm: rllms, shared.verl: verls}))
            conflicts = [one.outcome.text for one in found.keys if "keep one of them" in one.outcome.text]
            assert conflicts == [], shared


def test_asynchronous_training_is_verls() -> None:
    section = {
        "enable": True,
        "mini_batch_size": 16,
        "staleness_threshold": 4.0,
        "trigger_parameter_sync_step": 2,
        "partial_rollout": True,
    }
    found = translate_rllm(
        {
            "rllm": {"async_training": section},
            "async_training": {"partial_rollout": False},
            "data": {"train_batch_size": 1},
            "rollout": {"nnodes": 1, "n_gpus_per_node": 4},
        }
    )
    assert found.overrides == {
        "+async_pipeline": True,
        f"{ACTOR}.ppo_mini_batch_size": 16,
        "+async_training.require_batches": 1,
        "+async_training.staleness_threshold": 4.0,
        "+async_training.trigger_parameter_sync_step": 2,
        "+async_training.partial_rollout": True,
        f"{ROLLOUT}.nnodes": 1,
        f"{ROLLOUT}.n_gpus_per_node": 4,
    }
    assert found.unsupported == found.unknown == []
    off = translate_rllm({"rllm": {"async_training": section | {"enable": False}}})
    assert off.overrides == {"+async_pipeline": True}
    assert {one.outcome.kind for one in off.keys} == {"differs", "nothing to do"}


@pytest.mark.parametrize(
    ("key", "value", "overrides"),
    [
        ("rllm.algorithm.kl_beta", 0.1, {f"{ACTOR}.kl_loss_coef": 0.1, f"{ACTOR}.use_kl_loss": True}),
        ("rllm.algorithm.eps_clip", 0.3, {f"{ACTOR}.clip_ratio_low": 0.3, f"{ACTOR}.clip_ratio_high": 0.3}),
        ("rllm.algorithm.loss_fn", None, {}),
        ("rllm.trainer.total_batches", -1, {}),
        ("rllm.trainer.total_batches", 9, {"trainer.total_training_steps": 9}),
        ("rllm.trainer.logger", ["console", "ui"], {"trainer.logger": ["console"]}),
        ("rllm.agent.trajectory_timeout", None, {}),
        ("model.name", "m", {"actor_rollout_ref.model.path": "m"}),
        ("custom_reward_function.path", "r.py", {"reward.custom_reward_function.path": "r.py"}),
        ("trainer.log_episodes", True, {}),
    ],
)
def test_single_keys(key: str, value: Any, overrides: dict[str, Any]) -> None:
    found = translate_rllm(nested({key: value}))
    assert found.overrides == {"+async_pipeline": True, **overrides}
    assert found.unknown == found.unsupported == []


def test_backends_that_are_services_are_unsupported() -> None:
    found = translate_rllm({"tinker_base_url": None, "training": {"learning_rate": 1e-5}})
    assert found.unsupported == ["tinker_base_url", "training.learning_rate"]
