# SPDX-License-Identifier: Apache-2.0
"""The training engine and the loss in words."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.checks.rollout_correction import POLICY_LOSS
from recipe.async_pipeline.tools.explain.training import describe_loss, describe_teachers, describe_training
from tests.fakes.alias_values import nested


@pytest.mark.parametrize(
    ("actor", "devices", "text"),
    [
        ({"strategy": "fsdp2"}, 1, "FSDP2, weights sharded over one device"),
        ({"strategy": "fsdp2", "fsdp_config": {"fsdp_size": -1}}, 4, "FSDP2, weights sharded over 4 devices"),
        (
            {"strategy": "fsdp", "fsdp_config": {"fsdp_size": 2}, "ulysses_sequence_parallel_size": 2},
            8,
            "FSDP, weights sharded over 2 devices, 4 copies, sequences over 2 (Ulysses)",
        ),
        (
            {"strategy": "fsdp", "fsdp_config": {"ulysses_sequence_parallel_size": 4}},
            8,
            "FSDP, weights sharded over 8 devices, sequences over 4 (Ulysses)",
        ),
        (
            {
                "strategy": "fsdp",
                "fsdp_config": {"ulysses_sequence_parallel_size": 4},
                "ulysses_sequence_parallel_size": 2,
            },
            8,
            "FSDP, weights sharded over 8 devices, sequences over 2 (Ulysses)",
        ),
        ({"strategy": "megatron", "megatron": {}}, 2, "Megatron, data-parallel 2"),
        (
            {
                "strategy": "megatron",
                "megatron": {
                    "tensor_model_parallel_size": 2,
                    "pipeline_model_parallel_size": 2,
                    "context_parallel_size": 1,
                    "expert_model_parallel_size": 4,
                    "expert_tensor_parallel_size": None,
                },
            },
            16,
            "Megatron, tensor-parallel 2, pipeline-parallel 2, expert-parallel 4, data-parallel 4",
        ),
    ],
)
def test_the_engine_and_its_sizes_are_named(actor: dict[str, Any], devices: int, text: str) -> None:
    assert describe_training({"actor_rollout_ref": {"actor": actor}}, devices) == text


@pytest.mark.parametrize(
    ("mode", "old_logp", "mini_batches", "words"),
    [
        (
            "vanilla",
            "trainer",
            1,
            "vanilla (pg_variant ppo): ratio of the current policy to version s-1; one update per step, so "
            "the ratio is 1",
        ),
        ("vanilla", "trainer", 2, "vanilla (pg_variant ppo): ratio of the current policy to version s-1"),
        ("tis", "rollout", 1, "tis: ratio of the current policy to the versions that generated the tokens"),
        ("dro", "logp_pool", 1, "dro (pg_variant kimi15): ratio of the current policy to version s-2"),
        (
            "policy_gradient",
            "trainer",
            1,
            "policy_gradient (pg_variant vanilla): no ratio to an old policy",
        ),
        ("gspo", "rollout", 4, "gspo: ratio of the current policy to the versions that generated the tokens"),
    ],
)
def test_the_ratio_of_a_loss_is_described(mode: str, old_logp: str, mini_batches: int, words: str) -> None:
    assert describe_loss(nested((f"{POLICY_LOSS}.loss_mode", mode)), old_logp, mini_batches) == words


def test_more_epochs_are_more_updates() -> None:
    config = nested((f"{POLICY_LOSS}.loss_mode", "tis"), ("actor_rollout_ref.actor.ppo_epochs", 2))
    assert "ratio is 1" not in describe_loss(config, "trainer", 1)


def test_what_is_learned_from_teachers_is_described() -> None:
    loss, models = "distillation.distillation_loss", "distillation.teacher_models"
    config = nested(
        ("distillation.enabled", True),
        ("distillation.teacher_key", "data_source"),
        (f"{loss}.loss_mode", "forward_kl_topk"),
        (f"{loss}.topk", 32),
        (f"{loss}.use_task_rewards", False),
        (f"{models}.teacher_model.model_path", "m"),
    )
    assert describe_teachers(config) == [
        "forward_kl_topk over 32 tokens as a loss, instead of the loss of rewards",
        "teacher m",
    ]
    config["distillation"]["distillation_loss"] |= {
        "loss_mode": "k1",
        "use_policy_gradient": True,
        "use_task_rewards": True,
        "distillation_loss_coef": 0.5,
    }
    config["distillation"]["teacher_models"] |= {
        name: {"model_path": f"m{name}", "key": name} for name in ("a", "b")
    }
    assert describe_teachers(config) == [
        "k1 of the written token as an advantage, times 0.5, added to the loss of rewards",
        "teacher ma, for data_source=a",
        "teacher mb, for data_source=b",
    ]
    assert not describe_teachers(nested(("distillation.enabled", False)))
