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

from ..config.adapters import adapter_rank, publishes_adapters
from ..config.divisibility import check_replicas
from ..config.paths import MODE, OWN, PATCH_FREE
from ..config.placement import Placement
from ..config.schema import AsyncPipelineConfig
from ..errors import ConfigError
from .megatron_rules import check_megatron
from .model_rules import MODEL, ROLLOUT, check_model
from .ray_cluster import address_to_join

MANAGER = "recipe.async_pipeline.verl_bridge.agent_loop.manager.PushAgentLoopManager"
_ENGINE = f"{ROLLOUT}.checkpoint_engine"
STRATEGIES = ("fsdp", "fsdp2", "megatron")
DTYPES = ("bfloat16", "float16", "float32")
"""The training engines whose weights can be published."""
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
    for rule in RULES:
        path, allowed, why, remedy = rule
        value = OmegaConf.select(config, path)
        if not allowed(value):
            raise ConfigError(f"{path} {why}, got {value!r}; {remedy}")
    check_megatron(config, critic=has_critic(config))
    _check_adapters(config)
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

    critic = placement.pool_of("critic")
    if critic is not None:
        strategy = config.critic.strategy
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"critic.strategy must be one of {', '.join(STRATEGIES)}, got {strategy}; other training "
                "engines are not supported yet"
            )
    elif config.trainer.critic_warmup:
        raise ConfigError(
            f"trainer.critic_warmup must be 0 without a critic, got {config.trainer.critic_warmup}; set "
            "algorithm.adv_estimator=gae to use one"
        )

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

    if not model.enable_resource_pool:
        raise ConfigError(
            f"{path}.enable_resource_pool must be True, got {model.enable_resource_pool}; set it with "
            f"{path}.nnodes and {path}.n_gpus_per_node, since the model scores while the trainer trains"
        )
    for name in ("nnodes", "n_gpus_per_node"):
        if not _positive(model[name]):
            raise ConfigError(
                f"{path}.{name} must be >= 1, got {model[name]!r}; set the devices of the reward model"
            )
    if model.rollout.free_cache_engine:
        raise ConfigError(
            f"{path}.rollout.free_cache_engine must be False, got True; set it, since the model does not "
            "share its devices"
        )

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


def _check_adapters(config: DictConfig) -> None:
    """Raises ConfigError if the pipeline cannot publish the LoRA adapter."""
    model, rank = config.actor_rollout_ref.model, adapter_rank(config)
    trained = model.get("lora_rank") or 0
    if rank != trained:
        raise ConfigError(
            f"{MODEL}.lora.rank must be 0 or {MODEL}.lora_rank={trained} with fsdp and fsdp2, which read "
            f"only the latter, got {rank}; set {MODEL}.lora_rank"
        )
    if not trained and model.get("lora_adapter_path") is not None:
        raise ConfigError(
            f"{MODEL}.lora_adapter_path requires {MODEL}.lora_rank >= 1, got 0, with which all weights are "
            "trained; set it to the rank of the adapter"
        )
    if not publishes_adapters(config):
        return
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy == "fsdp":
        raise ConfigError(
            "actor_rollout_ref.actor.strategy must be fsdp2 for LoRA adapters that are not merged, got "
            f"{strategy}; set it, or {MODEL}.lora.merge=True"
        )
    load_format = OmegaConf.select(config, f"{ROLLOUT}.load_format")
    if load_format in (None, "dummy"):
        raise ConfigError(
            f"{ROLLOUT}.load_format must not be dummy for LoRA adapters, whose base is not published, got "
            f"{load_format!r}; set it to auto, or actor_rollout_ref.model.lora.merge=True"
        )


def _positive(value: Any) -> bool:
    return _whole(value) and value > 0


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole_or_none(value: Any) -> bool:
    return value is None or (_whole(value) and value >= 0)


RULES = (
    (
        MODE,
        lambda v: v in ("sync", PATCH_FREE),
        "must not be changed",
        "set async_strategy instead",
    ),
    (f"{_ENGINE}.backend", lambda v: v in ("naive", "dual_buffer"), "must be dual_buffer", "leave it out"),
    (
        f"{_ENGINE}.update_weights_bucket_megabytes",
        lambda v: v == 2048,
        "must not be changed",
        f"set {OWN}.weight_sync.gather_bucket_size_mb instead",
    ),
    (
        f"{ROLLOUT}.agent.agent_loop_manager_class",
        lambda v: v in (None, MANAGER),
        "must not be changed",
        "leave it out: the pipeline needs run_group, which returns each group when it is complete, or "
        "recalls it, and transcripts, from which checkpoints get unfinished requests and versions of tokens; "
        "verl's and uni-agent's managers have neither; run the agent as "
        "trainer.v1.async_pipeline.agentic.agent",
    ),
    (f"{ROLLOUT}.n", _positive, "must be >= 1", "it is the responses to each prompt"),
    ("data.train_batch_size", _positive, "must be >= 1", "it is the prompts of one step"),
    (
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        _positive,
        "must be >= 1",
        "it is the prompts of one optimizer update",
    ),
    (
        f"{ROLLOUT}.max_num_seqs",
        _positive,
        "must be >= 1",
        "it is the responses that a replica generates concurrently",
    ),
    (
        f"{ROLLOUT}.tensor_model_parallel_size",
        _whole,
        "must be a whole number",
        "it is the devices of one replica",
    ),
    ("critic.ppo_mini_batch_size", _positive, "must be >= 1", "it is the prompts of one critic update"),
    ("trainer.critic_warmup", _whole_or_none, "must be >= 0", "it is the steps that train only the critic"),
    ("actor_rollout_ref.model.lora_rank", _whole_or_none, "must be >= 0", "0 trains all weights"),
    ("actor_rollout_ref.model.lora.rank", _whole_or_none, "must be >= 0", "0 trains all weights"),
    ("ray_kwargs.ray_init.num_gpus", _whole_or_none, "must be >= 0", "it is the devices that Ray may use"),
    ("reward.num_workers", _positive, "must be >= 1", "leave it out for verl's default"),
    (
        "trainer.total_training_steps",
        lambda v: v is None or _positive(v),
        "must be >= 1",
        "leave it out to train by epochs",
    ),
    ("trainer.use_v1", lambda v: v is True, "must be True", "the pipeline builds on verl's V1 trainer"),
    (
        f"{ROLLOUT}.name",
        lambda v: v in ("vllm", "sglang", "diffusers"),
        "must be vllm, sglang, or diffusers for images",
        "other engines are not supported yet",
    ),
    (f"{ROLLOUT}.mode", lambda v: v == "async", "must be async", "remove the override"),
    (f"{ROLLOUT}.data_parallel_size", lambda v: v == 1, "must be 1", "use more replicas instead"),
    (
        f"{ROLLOUT}.pipeline_model_parallel_size",
        lambda v: v == 1,
        "must be 1",
        "use tensor parallelism or more replicas instead",
    ),
    (
        f"{ROLLOUT}.quantization",
        lambda v: v in (None, "fp8"),
        "must be null or fp8",
        "weights cannot be converted to other formats yet",
    ),
    (
        "actor_rollout_ref.actor.qat.enable",
        lambda v: not v,
        "must be False",
        "quantization-aware training is not supported yet",
    ),
    (
        "actor_rollout_ref.actor.fsdp_config.qat.enable",
        lambda v: not v,
        "must be False",
        "quantization-aware training is not supported yet",
    ),
    (
        f"{ROLLOUT}.qat.enable",
        lambda v: not v,
        "must be False",
        "quantization-aware training is not supported yet",
    ),
    (
        f"{MODEL}.mtp.enable",
        lambda v: not v,
        "must be False",
        "the drafter of multi-token prediction would not be updated",
    ),
    (
        f"{ROLLOUT}.mtp.enable",
        lambda v: not v,
        "must be False",
        "the drafter of multi-token prediction would not be updated",
    ),
    (
        f"{ROLLOUT}.enable_rollout_routing_replay",
        lambda v: not v,
        "must be False",
        "the routing of a response is not recorded for each of its tokens and versions yet",
    ),
    (
        f"{ROLLOUT}.moe_load_balance_metrics_interval",
        lambda v: not v,
        "must be 0",
        "the routing of responses is not recorded yet",
    ),
    (
        f"{ROLLOUT}.dtype",
        lambda v: v in DTYPES,
        f"must be one of {', '.join(DTYPES)}",
        "weights are published and served in it",
    ),
    (f"{ROLLOUT}.disaggregation.enabled", lambda v: not v, "must be False", "it is not supported yet"),
    (
        "actor_rollout_ref.actor.strategy",
        lambda v: v in STRATEGIES,
        f"must be one of {', '.join(STRATEGIES)}",
        "other training engines are not supported yet",
    ),
    ("trainer.val_only", lambda v: not v, "must be False", "validate with stock verl instead"),
    ("distillation.enabled", lambda v: not v, "must be False", "distillation is not supported yet"),
    (
        "skip.rollout_tq.enable",
        lambda v: not v,
        "must be False",
        "replaying stored rollouts is not supported yet",
    ),
)
