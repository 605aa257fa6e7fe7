# SPDX-License-Identifier: Apache-2.0
"""Keys of other systems, each with a value and the knobs that it sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        (f"{ROLLOUT}.{name}", 1.0, {})
        for name in ("guidance_scale", "pipeline.guidance_scale", "pipeline.true_cfg_scale")
    ),
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
