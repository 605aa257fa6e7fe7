# SPDX-License-Identifier: Apache-2.0
"""Keys of other systems, each with a value and the knobs that it sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"


ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"


UNDERSTOOD: list[tuple[str, Any, dict[str, Any]]] = [
    ("async_strategy", "n-step-ahead", {"strategy": "n_step_ahead", "staleness.max_lag": 3}),
    (
        "actor_rollout_ref.async_strategy",
        "one-step-off",
        {"strategy": "one_step_off", "staleness.max_lag": 1},
    ),
    ("trainer.generate_ahead_steps", 1, {"strategy": "on_policy", "staleness.max_lag": 0}),
    ("trainer.generate_ahead_steps", 2, {"strategy": "one_step_off", "staleness.max_lag": 1}),
    ("trainer.generate_ahead_steps", 5, {"strategy": "n_step_ahead", "staleness.max_lag": 4}),
    ("async_generation_ratio", 0, {"strategy": "on_policy", "staleness.max_lag": 0}),
    ("async_generation_ratio", 2.0, {"strategy": "n_step_ahead", "staleness.max_lag": 2}),
    (
        "async_generation_ratio",
        0.25,
        {"strategy": "n_step_ahead", "staleness.max_lag": 1, "staleness.oldest_share": 0.25},
    ),
    (
        "async_generation_ratio",
        1.5,
        {"strategy": "n_step_ahead", "staleness.max_lag": 2, "staleness.oldest_share": 0.5},
    ),
    *(
        (f"{prefix}{name}", value, {"strategy": "fully_async", **meaning})
        for prefix in ("", "async_training.")
        for name, value, meaning in (
            ("staleness_threshold", 0, {"staleness.max_lag": 0}),
            ("staleness_threshold", 0.5, {"staleness.max_lag": 1, "staleness.oldest_share": 0.5}),
            ("staleness_threshold", 2, {"staleness.max_lag": 2}),
            ("trigger_parameter_sync_step", 1, {"staleness.max_lag": 0}),
            ("trigger_parameter_sync_step", 4, {"staleness.max_lag": 3, "weight_sync.every": 4}),
        )
    ),
    *(
        (f"{prefix}partial_rollout", value, {"weight_sync.in_flight_policy": meaning})
        for prefix in ("", "async_training.")
        for value, meaning in ((True, "keep"), (False, "drain"))
    ),
    (f"{ROLLOUT}.enable_dual_buffer", True, {}),
    (f"{ROLLOUT}.with_reward", True, {}),
    (f"{ROLLOUT}.with_reward", False, {"reward.while_generating": False}),
    (f"{ROLLOUT}.param_update_preduce_bucket_size_mb", 64, {"weight_sync.gather_bucket_size_mb": 64}),
    (f"{ROLLOUT}.param_update_consume_bucket_size_mb", 32, {"weight_sync.load_bucket_size_mb": 32}),
    *(
        (f"{ROLLOUT}{section}.{name}", value, {f"diffusion.{name}": value})
        for section in ("", ".algo")
        for name, value in (("noise_level", 0.8), ("sde_type", "cps"), ("sde_window_size", 3))
    ),
    (f"{ROLLOUT}.num_inference_steps", 12, {"diffusion.num_inference_steps": 12}),
    (f"{ROLLOUT}.image_height", 384, {"diffusion.height": 384}),
    (f"{ROLLOUT}.image_width", 384, {"diffusion.width": 384}),
    *(
        (f"{ROLLOUT}.pipeline.{name}", value, {f"diffusion.{name}": value})
        for name, value in (
            ("num_inference_steps", 12),
            ("height", 384),
            ("width", 384),
            ("max_sequence_length", 77),
        )
    ),
    (f"{ROLLOUT}.val_kwargs.pipeline.num_inference_steps", 28, {"diffusion.validation_steps": 28}),
    *(
        (f"{ROLLOUT}.{name}", 4.5, {"diffusion.guidance_scale": 4.5})
        for name in ("guidance_scale", "pipeline.guidance_scale")
    ),
    (f"{ROLLOUT}.pipeline.true_cfg_scale", 1.0, {}),
    (f"{ROLLOUT}.val_kwargs.algo.noise_level", 0.0, {}),
    ("actor_rollout_ref.actor.diffusion_loss.loss_mode", "flow_grpo", {}),
    ("actor_rollout_ref.actor.diffusion_loss.clip_ratio", 1e-5, {}),
    ("actor_rollout_ref.actor.n_gpus_per_node", 2, {}),
]

WITH_OTHERS: list[tuple[str, Any, dict[str, Any]]] = [
    (
        f"{ROLLOUT}{section}.sde_window_range",
        [0, 5],
        {"diffusion.sde_window_first": 0, "diffusion.sde_window_end": 5},
    )
    for section in ("", ".algo")
]
"""Keys that require another one."""


FLAT: dict[str, Any] = {
    "actor_rollout_ref.async_strategy": "one-step-off",
    f"{ROLLOUT}.with_reward": True,
    f"{ROLLOUT}.guidance_scale": 1.0,
    f"{ROLLOUT}.noise_level": 0.8,
    f"{ROLLOUT}.sde_type": "cps",
    f"{ROLLOUT}.sde_window_size": 3,
    f"{ROLLOUT}.sde_window_range": [0, 5],
    f"{ROLLOUT}.num_inference_steps": 10,
    f"{ROLLOUT}.image_height": 384,
    f"{ROLLOUT}.image_width": 384,
    f"{LOSS}.loss_mode": "flow_grpo",
    f"{ACTOR}.n_gpus_per_node": 2,
}
"""A script with flat keys for images."""

NESTED: dict[str, Any] = {
    "actor_rollout_ref.async_strategy": "one-step-off",
    f"{ROLLOUT}.pipeline.height": 384,
    f"{ROLLOUT}.pipeline.width": 384,
    f"{ROLLOUT}.pipeline.num_inference_steps": 10,
    f"{ROLLOUT}.pipeline.guidance_scale": 1.0,
    f"{ROLLOUT}.pipeline.max_sequence_length": 256,
    f"{ROLLOUT}.algo.noise_level": 0.8,
    f"{ROLLOUT}.algo.sde_type": "cps",
    f"{ROLLOUT}.algo.sde_window_size": 3,
    f"{ROLLOUT}.algo.sde_window_range": [0, 5],
    f"{ROLLOUT}.val_kwargs.pipeline.num_inference_steps": 28,
    f"{ROLLOUT}.val_kwargs.algo.noise_level": 0.0,
    f"{ACTOR}.diffusion_loss.loss_mode": "flow_grpo",
    f"{ACTOR}.diffusion_loss.clip_ratio": 1e-5,
}
"""A script with nested ones."""

_OF_EACH_SCRIPT: dict[str, Any] = {
    "algorithm.adv_estimator": "flow_grpo",
    "data.val_max_samples": 32,
    "data.max_prompt_length": 512,
    "data.truncation": "error",
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.model.lora_rank": 32,
    "actor_rollout_ref.model.lora_alpha": 64,
    f"{ACTOR}.optim.lr": 1e-4,
    f"{ACTOR}.optim.weight_decay": 1e-4,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0,
    f"{ACTOR}.fsdp_config.param_offload": False,
    f"{ACTOR}.fsdp_config.optimizer_offload": False,
    f"{ACTOR}.fsdp_config.dtype": "float16",
    f"{ACTOR}.fsdp_config.fsdp_size": 1,
    f"{LOSS}.loss_mode": "flow_grpo",
    f"{ROLLOUT}.name": "diffusers",
    f"{ROLLOUT}.n": 8,
    f"{ROLLOUT}.guidance_scale": 1.0,
    f"{ROLLOUT}.noise_level": 0.8,
    f"{ROLLOUT}.sde_type": "cps",
    f"{ROLLOUT}.sde_window_size": 3,
    f"{ROLLOUT}.sde_window_range": [0, 5],
    f"{ROLLOUT}.dtype": "float16",
    f"{ROLLOUT}.free_cache_engine": False,
    f"{ROLLOUT}.mode": "async",
    "reward_model.reward_manager": "diffusion-batch",
    "trainer.logger": ["console", "wandb"],
    "trainer.project_name": "flow_grpo",
    "trainer.experiment_name": "sd35_m_ocr_fast",
    "trainer.save_freq": 100,
    "trainer.test_freq": 5,
    "trainer.total_epochs": 15,
}

GERL_REFUSED: dict[str, Any] = {"data.data_source": "ocr", "data.reward_fn": ["paddle-ocr"]}
"""Settings of these scripts that have no meaning here."""


class Sizes(NamedTuple):
    """In what GeRL's scripts differ: devices of actor and rollout, prompts of a step and of a mini-batch."""

    actors: int
    rollouts: int
    batch: int
    mini_batch: int

    @property
    def keys(self) -> dict[str, Any]:
        """Every setting of a script but the files, the model and `GERL_REFUSED`."""
        return {
            **_OF_EACH_SCRIPT,
            "data.train_batch_size": self.batch,
            f"{ACTOR}.ppo_mini_batch_size": self.mini_batch,
            f"{ACTOR}.n_gpus_per_node": self.actors,
            f"{ROLLOUT}.n_gpus_per_node": self.rollouts,
        }


GERL_SCRIPTS: dict[str, Sizes] = {
    "2p_a1_r1": Sizes(1, 1, 8, 4),
    "3p_a1_r2": Sizes(1, 2, 8, 4),
    "3p_a2_r1": Sizes(2, 1, 16, 8),
}
"""The scripts of separate devices that GeRL has for Flow-GRPO-Fast, by the end of their names."""


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """Return a nested mapping of dotted paths and values."""
    root: dict[str, Any] = {}
    for path, value in pairs:
        *folders, leaf = path.split(".")
        node = root
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = value
    return root


def own(knobs: Mapping[str, Any]) -> dict[str, Any]:
    return nested(*((f"{OWN}.{path}", value) for path, value in knobs.items()))


def assert_one_line(caught: pytest.ExceptionInfo[ConfigError], *parts: str) -> None:
    """Assert that an error has one line, with these parts."""
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text
