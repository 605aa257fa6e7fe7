# SPDX-License-Identifier: Apache-2.0
"""Refuse options of verl that the pipeline does not support and sizes that do not fit the devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from ..config.adapters import adapter_rank
from ..config.divisibility import check_replicas
from ..config.paths import OWN
from ..config.placement import Placement
from ..config.refusals import Settings, refuse
from ..config.schema import AsyncPipelineConfig
from ..config.verl_options import ADAPTERS, REWARD_MODEL, RULES, WITH_CRITIC, WITHOUT_CRITIC
from ..errors import ConfigError
from .megatron_rules import check_megatron
from .model_rules import ROLLOUT, check_model
from .ray_cluster import address_to_join

_ABSENT = object()


def has_critic(config: DictConfig) -> bool:
    """Return whether verl will use a critic, without the warning that verl prints if it will not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(need_critic(config))


def check_sections(config: DictConfig) -> None:
    """Raises ConfigError if a value replaces a section of verl, which would make its keys unreadable."""
    for path in _sections_of_verl():
        value = OmegaConf.select(config, path, default=_ABSENT)
        # None switches off many of verl's smaller sections.
        optional = path.count(".") > path.startswith("actor_rollout_ref.")
        if not (isinstance(value, DictConfig) or value is _ABSENT or (value is None and optional)):
            raise ConfigError(f"{path} must be a section, got {value!r}; set a key of it")


@cache
def _sections_of_verl() -> tuple[str, ...]:
    """Return the dotted paths of all sections that have keys by default, outer ones first."""

    def below(tree: Any, path: str) -> Iterator[str]:
        for name, value in tree.items():
            if isinstance(value, dict) and value:
                yield f"{path}{name}"
                yield from below(value, f"{path}{name}.")

    defaults = OmegaConf.load(str(files("verl.trainer.config") / "_generated_ppo_trainer.yaml"))
    return tuple(below(OmegaConf.to_container(defaults), ""))


def check_verl_config(config: DictConfig) -> None:
    """Raises ConfigError for an option of verl that the pipeline does not support."""
    at = Settings(config)
    refuse(RULES, at)
    check_megatron(config, critic=has_critic(config))
    refuse(ADAPTERS, at)
    check_model(config)


def check_devices(config: DictConfig, placement: Placement, knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError if a model cannot be divided over its pool, or Ray has too few devices."""
    generate = placement.pool_of("generate")
    assert generate is not None
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    # The number describes a new cluster; one that runs already has its own.
    joins = address_to_join(config) is not None
    there = None if joins else OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus")
    needed = placement.devices + reward_model_devices(config)

    devices = f"{ROLLOUT}.n_gpus_per_node, or its pool"
    more = sum(-part % tp for part in generate.per_node) if tp >= 1 else 0
    if more and there is not None and needed + more > there:
        # Otherwise the next try would fail for this reason.
        devices += f", and ray_kwargs.ray_init.num_gpus={needed + more}"
    check_replicas(generate, tp, f"{ROLLOUT}.tensor_model_parallel_size", devices)
    _check_fleet(generate.devices // tp, knobs.fleet.max_replicas)

    refuse(WITHOUT_CRITIC if placement.pool_of("critic") is None else WITH_CRITIC, Settings(config))

    if there is not None and needed > there:
        pools = {pool.name: pool.devices for pool in placement.pools}
        pools |= {"reward model": extra} if (extra := reward_model_devices(config)) else {}
        each = ", ".join(f"{name} {devices}" for name, devices in pools.items())
        raise ConfigError(
            f"ray_kwargs.ray_init.num_gpus must be at least {needed}, the devices of the run ({each}), got "
            f"{there}; set it to {needed}, or use fewer devices"
        )

    _check_loads(config, placement, knobs)


def _check_fleet(replicas: int, most: int) -> None:
    """Raises ConfigError if a run may have fewer replicas than it starts with."""
    if 0 < most < replicas:
        raise ConfigError(
            f"{OWN}.fleet.max_replicas must be 0 or at least the {replicas} replicas of the placement, got "
            f"{most}; raise it, or leave it out to add none"
        )


def reward_model_devices(config: DictConfig) -> int:
    """Return the devices of the reward model, in addition to the pools, or 0 without one.

    Raises ConfigError if it would share devices with training, or could not score during generation.
    """
    path = "reward.reward_model"
    model = config.reward.reward_model
    if not model.enable:
        return 0

    refuse(REWARD_MODEL, Settings(config))
    devices, tp = int(model.nnodes * model.n_gpus_per_node), model.rollout.tensor_model_parallel_size
    if tp < 1 or devices % tp:
        raise ConfigError(
            f"{path}.rollout.tensor_model_parallel_size must divide its {devices} devices, got {tp}; set "
            "it to 1"
        )
    return devices


def _check_loads(config: DictConfig, placement: Placement, knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError if a forward-only model must load published weights but cannot."""
    every = knobs.training.ref_refresh_every
    if every and not need_reference_policy(config):
        raise ConfigError(
            f"{OWN}.training.ref_refresh_every must be 0 without a reference policy, got {every}; "
            "set actor_rollout_ref.actor.use_kl_loss=True to use one"
        )

    strategy = config.actor_rollout_ref.actor.strategy
    cases = (
        (placement.own_pool_of("logp") is not None, "logp", "let logp share the training devices"),
        (every > 0, "ref_logp", f"leave {OWN}.training.ref_refresh_every out"),
    )
    for loads, role, other in cases:
        if loads and strategy == "fsdp":
            raise ConfigError(
                f"actor_rollout_ref.actor.strategy must be fsdp2 or megatron if {role} loads published "
                f"weights, got {strategy}; set it, or {other}"
            )

    if every and adapter_rank(config) and placement.own_pool_of("ref_logp") is None:
        raise ConfigError(
            f"{OWN}.training.ref_refresh_every must be 0 with LoRA unless ref_logp has its own pool, got "
            f"{every}; on the training devices the reference is the trainer's model without its adapters: "
            "leave it out, or give ref_logp a pool"
        )
