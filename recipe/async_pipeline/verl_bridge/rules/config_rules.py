# SPDX-License-Identifier: Apache-2.0
"""Refuse options of verl that the pipeline does not support and sizes that do not fit the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...config.checks.divisibility import check_class, check_replicas
from ...config.checks.refusals import Settings, check_all, refuse
from ...config.checks.rollout_correction import (
    CORRECTION,
    FLOW,
    LEFT_OUT,
    PARAMETERS,
    POLICY_LOSS,
    PROCESS,
    check_estimator,
    check_loss,
)
from ...config.checks.teachers import check_teachers
from ...config.checks.user_classes import find_class, schedule_at
from ...config.checks.verl_options import (
    ADAPTERS,
    ESTIMATORS,
    REWARD_MODEL,
    RULES,
    SAMPLING,
    WITH_CRITIC,
    WITHOUT_CRITIC,
)
from ...config.checks.verl_values import VALUES
from ...config.derived.adapters import adapter_rank
from ...config.keys.foreign_keys import LOSS_CONFIG, OWN_LOSSES
from ...config.knobs.schema import AsyncPipelineConfig
from ...config.paths import OWN, hint, select, walk
from ...config.placement import Placement
from ...core.graph import GRAPH, OPTIONAL, graph_of, insert_custom_stages
from ...errors import ConfigError
from ...installed.verl import COMPOSED
from ..launch.light_verl import compute, fields_of, registered_estimators, registered_losses
from ..launch.run_config import address_to_join
from ..workers.attention import check_attention
from .megatron_rules import ACTOR, CRITIC, REF, check_megatron
from .model_rules import ROLLOUT, check_model, has_critic, has_reference
from .verl_keys import verl_trees

STOCK_LOSS_CONFIG = "verl.workers.config.PolicyLossConfig"
TEXTS = f"{CORRECTION}."
"""A section whose numbers may be texts, for bands."""
_ABSENT = object()


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

    return tuple(below(verl_trees()[COMPOSED[0]], ""))


def check_types(config: Mapping[str, Any]) -> None:
    """Raises ConfigError if a text is where verl has a number or a switch, which fails where it is used.

    `config`: resolved.
    """
    found = []
    for path, default in walk(verl_trees()[COMPOSED[0]]):
        if not isinstance(default, int | float) or path.startswith(TEXTS):
            continue
        value = select(config, path)
        if isinstance(value, str):
            kind = "True or False" if isinstance(default, bool) else "a number"
            found.append(f"{path} must be {kind}, got {value!r}; verl's default is {default}")
    if found:
        raise ConfigError(*found)


def check_engines(config: DictConfig) -> None:
    """Raises ConfigError if a model has a training engine that its section is not for."""
    sections = (ACTOR, *([REF] if has_reference(config) else []), *([CRITIC] if has_critic(config) else []))
    check_all(*(partial(check_class, config, section) for section in sections))


def check_verl_config(config: DictConfig) -> None:
    """Raises ConfigError for an option of verl that the pipeline does not support."""
    refuse((*RULES, *VALUES, *ESTIMATORS), Settings(config))


def check_adapters(config: DictConfig) -> None:
    """Raises ConfigError if adapters would not be trained, or could not be published."""
    refuse(ADAPTERS, Settings(config))


OPTION_CHECKS: tuple[Callable[[DictConfig], None], ...] = (
    check_engines,
    check_verl_config,
    lambda config: check_megatron(config, critic=has_critic(config)),
    check_adapters,
    check_model,
    check_attention,
    check_teachers,
)
"""Checks of verl's options, each of which runs, also if others refuse."""


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
    if every and not has_reference(config):
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
        if loads and strategy not in ("fsdp2", "megatron"):
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


def require_importable(knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError if the strategy is none, or a custom stage names a class that cannot be found."""
    schedule_at(knobs.strategy, f"{OWN}.strategy")
    for spec in knobs.custom_stages:
        target = spec.partition("@")[0]
        if ":" in target:
            find_class(target, f"{OWN}.custom_stages")


def require_stages_that_fit(config: DictConfig, knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError if a custom stage is not registered or its edge does not exist."""
    there = {
        "ref_logp": has_reference(config),
        "teacher": bool(OmegaConf.select(config, "distillation.enabled")),
    }
    roles = [role for role in GRAPH if role not in OPTIONAL or there.get(role, has_critic(config))]
    try:
        insert_custom_stages(graph_of(roles), knobs.custom_stages)
    except ConfigError as error:
        raise ConfigError(f"{OWN}.custom_stages: {error}") from None


def _check_loss(config: DictConfig, knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError for an unknown loss, or for parameters that it would refuse minutes later."""
    # Losses that an external library registers in the workers are unknown here.
    external = OmegaConf.select(config, "actor_rollout_ref.model.external_lib")
    check_loss(config, None if external else {*registered_losses(), *OWN_LOSSES})


def _check_loss_keys(losses: DictConfig) -> None:
    """Raises ConfigError for keys of `policy_loss` that no loss of verl or this package reads."""
    if losses.get("_target_") not in (STOCK_LOSS_CONFIG, LOSS_CONFIG):
        return
    known = [*fields_of(STOCK_LOSS_CONFIG), *PARAMETERS]
    unknown = [str(name) for name in losses if name not in known and name != "_target_"]
    if unknown:
        raise ConfigError(
            *(
                f"{POLICY_LOSS}.{name} is unknown, got {losses[name]!r}{hint(name, known)}; keys: "
                f"{', '.join(known)}"
                for name in unknown
            )
        )


def is_plain_weight(name: str, method: Any, threshold: Any) -> bool:
    """Return whether a correction need not be tried, which imports torch and takes half of `explain`."""
    plain = method in ("token", "sequence") and type(threshold) in (int, float)
    return name == "rollout_is" and plain and 0 < threshold < float("inf")


def _try_correction(section: Mapping[str, Any]) -> None:
    """Try the correction on one token with verl's own functions.

    Raises ConfigError if they refuse it, or if the token gets no weight.
    """
    for name, function, example in (
        (
            "rollout_is",
            "compute_rollout_correction_weights",
            "2.0, or for a band that contains 1 '\"0.5_5.0\"'",
        ),
        ("rollout_rs", "compute_rollout_rejection_mask", "'\"0.5_2.0\"' for k1, 0.1 for k2 and k3"),
    ):
        if section.get(name) is None:
            continue

        threshold = section.get(f"{name}_threshold")
        if is_plain_weight(name, section[name], threshold):
            continue
        work = partial(_why_no_weight, function, section[name], threshold)
        if why := compute(work, [f"verl.trainer.ppo.rollout_corr_helper.{function}"], torch=True):
            raise ConfigError(
                f"{CORRECTION}.{name}={section[name]} with {name}_threshold, got {threshold!r}, fails on a "
                f"token of ratio 1: {why}; e.g. {example}"
            )


def _why_no_weight(function: str, method: Any, threshold: Any) -> str:
    """Return why a function of verl gives a token of ratio 1 no weight, or nothing if it gives one."""
    import torch
    from verl.trainer.ppo import rollout_corr_helper

    token, mask = torch.zeros(1, 1), torch.ones(1, 1)
    try:
        weights = getattr(rollout_corr_helper, function)(token, mask, method, threshold)[0]
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        return " ".join(str(error).split()).rstrip(".")
    return "" if bool(weights.isfinite().all()) else "no finite weight"


CORRECTION_CHECKS: tuple[Callable[[DictConfig, AsyncPipelineConfig], None], ...] = (
    lambda config, knobs: refuse((*LEFT_OUT, *SAMPLING), Settings(config, knobs)),
    lambda config, knobs: check_estimator(config, {*registered_estimators(), FLOW, PROCESS}),
    _check_loss,
    lambda config, knobs: _check_loss_keys(config.actor_rollout_ref.actor.policy_loss),
    lambda config, knobs: _try_correction(OmegaConf.select(config, CORRECTION) or {}),
)
"""Checks whether the rollout correction would be left out silently, or be wrong; of these, too, the first one
that refuses a key decides.
"""
