# SPDX-License-Identifier: Apache-2.0
"""Keys of other systems with a value and what it becomes."""

from __future__ import annotations

from typing import Any

ROLLOUT = "actor_rollout_ref.rollout"


LOSS = "actor_rollout_ref.actor.policy_loss"


UNDERSTOOD: list[tuple[str, Any, dict[str, Any]]] = [
    ("async_strategy", "n-step-ahead", {"strategy": "n_step_ahead", "max_lag": 3}),
    ("actor_rollout_ref.async_strategy", "one-step-off", {"strategy": "one_step_off", "max_lag": 1}),
    ("trainer.generate_ahead_steps", 1, {"strategy": "on_policy", "max_lag": 0}),
    ("trainer.generate_ahead_steps", 2, {"strategy": "one_step_off", "max_lag": 1}),
    ("trainer.generate_ahead_steps", 5, {"strategy": "n_step_ahead", "max_lag": 4}),
    ("async_generation_ratio", 0, {"strategy": "on_policy", "max_lag": 0}),
    ("async_generation_ratio", 2.0, {"strategy": "n_step_ahead", "max_lag": 2}),
    ("async_generation_ratio", 0.25, {"strategy": "n_step_ahead", "max_lag": 1, "oldest_share": 0.25}),
    ("async_generation_ratio", 1.5, {"strategy": "n_step_ahead", "max_lag": 2, "oldest_share": 0.5}),
    *(
        (f"{prefix}{name}", value, {"strategy": "fully_async", **meaning})
        for prefix in ("", "async_training.")
        for name, value, meaning in (
            ("staleness_threshold", 0, {"max_lag": 0}),
            ("staleness_threshold", 0.5, {"max_lag": 1, "oldest_share": 0.5}),
            ("staleness_threshold", 2, {"max_lag": 2}),
            ("trigger_parameter_sync_step", 1, {"max_lag": 0}),
            ("trigger_parameter_sync_step", 4, {"max_lag": 3, "sync_every": 4}),
        )
    ),
    *(
        (f"{prefix}partial_rollout", value, {"in_flight": meaning})
        for prefix in ("", "async_training.")
        for value, meaning in ((True, "keep"), (False, "drain"))
    ),
    (f"{ROLLOUT}.enable_dual_buffer", True, {}),
    (f"{ROLLOUT}.with_reward", True, {}),
    (f"{ROLLOUT}.with_reward", False, {"reward_while_generating": False}),
    (f"{ROLLOUT}.param_update_preduce_bucket_size_mb", 64, {"preduce_bucket_size_mb": 64}),
    (f"{ROLLOUT}.param_update_consume_bucket_size_mb", 32, {"consume_bucket_size_mb": 32}),
]


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """A mapping out of dotted paths and values."""
    root: dict[str, Any] = {}
    for path, value in pairs:
        *folders, leaf = path.split(".")
        node = root
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = value
    return root
