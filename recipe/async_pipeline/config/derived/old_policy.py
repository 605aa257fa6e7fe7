# SPDX-License-Identifier: Apache-2.0
"""Whose log-probs are PPO's old log-probs in a run, and what needs a forward pass for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ..knobs.schema import AsyncPipelineConfig
from ..paths import OWN, select
from ..placement import POOLS, Placement

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_READERS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (f"{_ACTOR}.ppo_epochs", (None, 1), "the later updates of a step need them"),
    ("algorithm.use_kl_in_reward", (None, False), "the reward needs them"),
    (f"{_CORRECTION}.rollout_rs", (None,), "tokens are masked before the update"),
    (f"{_CORRECTION}.rollout_is_batch_normalize", (None, False), "weights are scaled before the update"),
    (
        f"{_ACTOR}.strategy",
        ("fsdp", "fsdp2", "megatron"),
        "this was tried with fsdp, fsdp2 and megatron only",
    ),
    (f"{_ACTOR}.megatron.router_replay.mode", (None, "disabled", "R3"), "they record the routes"),
    ("distillation.enabled", (None, False), "verl's loss of distillation reads them"),
    ("trainer.critic_warmup", (None, 0), "the first steps have no update"),
    (f"{OWN}.custom_stages", (None, (), []), "custom stages may read them"),
)
"""Keys, values with which nothing reads old log-probs before the update, and what does otherwise."""


def read_before_update(config: Mapping[str, Any]) -> str | None:
    """Return what needs the old log-probs before the update, as `KEY=VALUE, because REASON`, or None.

    `config` is verl's, resolved.
    """
    batch, mini = (select(config, key) for key in ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"))
    if mini is not None and batch != mini:
        return f"{_ACTOR}.ppo_mini_batch_size={mini}, because the later updates of a step need them"
    if (engine := select(config, "actor_rollout_ref.rollout.name")) == "diffusers":
        return f"actor_rollout_ref.rollout.name={engine}, because a picture has a log-prob for each step"
    for path, free, why in _READERS:
        if (value := select(config, path)) not in free:
            return f"{path}={value}, because {why}"
    return None


def proximal_policy(
    knobs: AsyncPipelineConfig, placement: Placement, *, bypass: bool, reader: str | None
) -> str:
    """Return the policy of old log-probs, one of `core.schedule.OldLogpSource`.

    `bypass` means that verl uses the log-probs of the rollout; `reader` is what needs them before the update,
    or None. Raises ConfigError if the placement or the reader does not permit the chosen policy.
    """
    path, pool = f"{OWN}.training.old_logp", placement.own_pool_of("logp")
    if bypass:
        return "rollout"
    if knobs.training.old_logp == "auto":
        if pool is not None:
            return "logp_pool" if knobs.staleness.max_lag > 0 else "trainer"
        return "update" if reader is None else "trainer"
    if knobs.training.old_logp == "update" and (reader is not None or pool is not None):
        why = f"with {reader}" if reader is not None else "with a pool for logp"
        raise ConfigError(f"{path} must not be update {why}; use auto")
    if knobs.training.old_logp == "logp_pool" and pool is None:
        raise ConfigError(
            f"{path}=logp_pool requires a pool for logp, which shares the training devices; add one to "
            f"{POOLS}, or use auto"
        )
    if knobs.training.old_logp == "logp_pool" and knobs.staleness.max_lag == 0:
        raise ConfigError(
            f"{path}=logp_pool requires {OWN}.staleness.max_lag > 0, got 0, because its policy is older than "
            "the one that generates; use trainer, or raise max_lag"
        )
    if knobs.training.old_logp == "trainer" and pool is not None and knobs.weight_sync.every > 1:
        raise ConfigError(
            f"{path}=trainer with a pool for logp requires {OWN}.weight_sync.every=1, got "
            f"{knobs.weight_sync.every}; set it, or use logp_pool"
        )
    return knobs.training.old_logp
