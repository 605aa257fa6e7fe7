# SPDX-License-Identifier: Apache-2.0
"""Keys of ROLL that stand for themselves become verl's."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.tools.translate.roll_run import RUN
from recipe.async_pipeline.tools.translate.rules import translate

ACTOR = "actor_rollout_ref.actor"
SCHEDULE = "lr_scheduler_type"


@pytest.mark.parametrize(
    ("document", "overrides"),
    [
        ({"max_grad_norm": 1}, {f"{ACTOR}.optim.clip_grad": 1.0}),
        ({"use_kl_loss": True}, {f"{ACTOR}.use_kl_loss": True}),
        ({"kl_loss_coef": "1e-3"}, {f"{ACTOR}.kl_loss_coef": 0.001}),
        ({"add_token_level_kl": False}, {"algorithm.use_kl_in_reward": False}),
        ({"init_kl_coef": 0.0}, {"algorithm.kl_ctrl.kl_coef": 0.0}),
        ({"track_with": "wandb"}, {"trainer.logger": ["console", "wandb"]}),
        ({"resume_from_checkpoint": False}, {"trainer.resume_mode": "disable"}),
        ({"resume_from_checkpoint": True}, {"trainer.resume_mode": "auto"}),
        ({"num_gpus_per_node": 4}, {"trainer.n_gpus_per_node": 4}),
        ({"dual_clip_loss": True}, {f"{ACTOR}.clip_ratio_c": 1.4}),
        # verl's bounds have defaults, which win over clip_ratio alone.
        ({"pg_clip": 0.1}, {f"{ACTOR}.clip_ratio{end}": 0.1 for end in ("", "_low", "_high")}),
        ({"value_clip": 0.5}, {"critic.cliprange_value": 0.5}),
        ({"target_kl": 0.1}, {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.1}),
        ({"max_ckpt_to_keep": 0}, {"trainer.max_actor_ckpt_to_keep": None}),
        ({"importance_sampling": "seq"}, {f"{ACTOR}.policy_loss.loss_mode": "gspo"}),
    ],
)
def test_what_is_set(document: dict[str, Any], overrides: dict[str, Any]) -> None:
    assert translate(document, RUN).overrides == overrides


def test_only_a_critic_has_a_clip_of_values() -> None:
    found = translate({"adv_estimator": "grpo", "value_clip": 0.5}, RUN)
    assert found.keys[-1].outcome.kind == "nothing to do" and not found.overrides


def test_a_range_of_the_ratio_replaces_its_clip() -> None:
    document = {"use_pg_clip_range": True, "pg_clip": 0.2, "pg_clip_low": 0.1, "pg_clip_high": 0.3}
    found = translate(document, RUN)
    assert found.overrides == {f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio_high": 0.3}
    clipped = translate({"pg_clip": 0.3, "dual_clip_loss": True}, RUN)
    assert clipped.overrides[f"{ACTOR}.clip_ratio_c"] == 1.6


@pytest.mark.parametrize(
    ("engine", "value", "overrides"),
    [
        ("deepspeed_train", "constant_with_warmup", {f"{ACTOR}.optim.{SCHEDULE}": "constant"}),
        ("deepspeed_train", "linear", {}),
        ("megatron_train", "linear", {f"{ACTOR}.optim.lr_decay_style": "linear"}),
    ],
)
def test_the_schedule_of_the_learning_rate(engine: str, value: str, overrides: dict[str, Any]) -> None:
    train = {"strategy_args": {"strategy_name": engine}, "training_args": {SCHEDULE: value}}
    assert translate({"actor_train": train}, RUN).overrides == overrides


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ({"dual_clip_loss": False}, "differs"),
        ({"pg_clip_low": 0.1}, "nothing to do"),
        ({"use_pg_clip_range": True}, "nothing to do"),
        ({"checkpoint_config": {"type": "file_system"}}, "differs"),
        ({"max_len_mask": True}, "differs"),
        ({"max_len_mask": False}, "nothing to do"),
        ({"use_topr_loss": True}, "differs"),
        ({"target_kl": None}, "nothing to do"),
        ({"system_envs": {"A": "1"}}, "by hand"),
        ({"tracker_kwargs": {"project": "x"}}, "by hand"),
        ({"reward_clip": 20}, "by hand"),
        ({"advantage_clip": 0.2}, "by hand"),
        ({"reward_normalization": {"grouping": "traj_group_id"}}, "differs"),
        ({"resume_from_checkpoint": "/c"}, "by hand"),
        ({"track_with": "ml_tracker"}, "by hand"),
        ({"max_actions_per_traj": 10}, "by hand"),
        ({"max_tokens_per_step": 64}, "nothing to do"),
    ],
)
def test_what_is_not_set_is_explained(document: dict[str, Any], kind: str) -> None:
    found = translate(document, RUN)
    assert [one.outcome.kind for one in found.keys] == [kind] and found.keys[0].outcome.text
    assert not found.overrides


def test_devices_of_workers_are_not_counted_twice() -> None:
    found = translate({"num_gpus_per_node": 8, "actor_train": {"device_mapping": [0, 1]}}, RUN)
    assert not found.overrides and found.keys[0].outcome.kind == "nothing to do"
