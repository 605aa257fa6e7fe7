# SPDX-License-Identifier: Apache-2.0
"""What of verl's config this pipeline can honour, and what fits the devices of a run. Anything else is an
error of one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from ..config.paths import OWN
from ..config.placement import Placement, check_divides
from ..config.schema import AsyncPipelineConfig
from ..errors import ConfigError

MANAGER = "recipe.async_pipeline.verl_bridge.agent_loop.manager.PushAgentLoopManager"
ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{ROLLOUT}.checkpoint_engine"
_ABSENT = object()


def has_critic(config: DictConfig) -> bool:
    """As verl decides, which also prints a warning where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(need_critic(config))


def check_sections(config: DictConfig) -> None:
    """Raises ConfigError: a value stands where verl has a section, so that nobody could look for a key in
    it.
    """
    for path in _sections_of_verl():
        value = OmegaConf.select(config, path, default=_ABSENT)
        # None turns off many of verl's smaller sections.
        optional = path.count(".") > path.startswith("actor_rollout_ref.")
        if not (isinstance(value, DictConfig) or value is _ABSENT or (value is None and optional)):
            raise ConfigError(f"{path} must be a section, got {value!r}; set a key of it")


@cache
def _sections_of_verl() -> tuple[str, ...]:
    """Dotted paths of all that have keys by default, from the top down."""

    def below(tree: Any, path: str) -> Iterator[str]:
        for name, value in tree.items():
            if isinstance(value, dict) and value:
                yield f"{path}{name}"
                yield from below(value, f"{path}{name}.")

    theirs = OmegaConf.load(str(files("verl.trainer.config") / "_generated_ppo_trainer.yaml"))
    return tuple(below(OmegaConf.to_container(theirs), ""))


def check_verl_config(config: DictConfig) -> None:
    """Raises ConfigError: verl options that this pipeline cannot honour (yet)."""
    for rule in RULES:
        path, allowed, why, remedy = rule
        value = OmegaConf.select(config, path)
        if not allowed(value):
            raise ConfigError(f"{path} {why}, got {value!r}; {remedy}")
    _check_adapters(config)


def check_devices(config: DictConfig, placement: Placement, knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError: a model or a batch that cannot be divided over its pool, or more devices than
    Ray is given.
    """
    generate, train = placement.pool_of("generate"), placement.pool_of("train")
    assert generate is not None
    assert train is not None
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if tp < 1 or generate.devices % tp:
        below = generate.devices // max(tp, 1) * tp
        nearest = [n for n in (below, below + tp) if n > 0] or [1]
        raise ConfigError(
            f"{ROLLOUT}.tensor_model_parallel_size must divide the {generate.devices} rollout devices, got "
            f"{tp}; "
            f"set it to 1 or give the rollout {' or '.join(map(str, nearest))} devices"
        )
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    critic = placement.pool_of("critic")
    for path, size in (
        ("actor_rollout_ref.actor.ppo_mini_batch_size", mini),
        *((("critic.ppo_mini_batch_size", config.critic.ppo_mini_batch_size),) if critic else ()),
    ):
        if size > batch:
            raise ConfigError(
                f"{path} must be at most data.train_batch_size={batch}, got {size}; set it to {batch}, or "
                "take larger batches"
            )
    check_divides(
        train,
        mini * config.actor_rollout_ref.rollout.n,
        "a mini-batch (actor.ppo_mini_batch_size x rollout.n)",
    )
    if critic is not None:
        strategy = config.critic.strategy
        if strategy not in ("fsdp", "fsdp2"):
            raise ConfigError(
                f"critic.strategy must be fsdp or fsdp2, got {strategy}; other training engines are not "
                "supported yet"
            )
        check_divides(
            critic,
            config.critic.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
            "a mini-batch (critic.ppo_mini_batch_size x rollout.n)",
        )
    elif config.trainer.critic_warmup:
        raise ConfigError(
            f"trainer.critic_warmup must be 0 without a critic, got {config.trainer.critic_warmup}; set "
            "algorithm.adv_estimator=gae for one"
        )
    there = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus")
    wanted = placement.devices + reward_model_devices(config)
    if there is not None and wanted > there:
        raise ConfigError(
            "ray_kwargs.ray_init.num_gpus must cover trainer.{nnodes,n_gpus_per_node} and "
            f"{ROLLOUT}.{{nnodes,"
            f"n_gpus_per_node}}, or all pools, and a reward model, together {wanted}, got {there}; raise "
            "it, or ask for fewer devices"
        )
    for role in ("logp", "ref_logp"):
        pool = placement.own_pool_of(role)
        if pool is not None:
            check_divides(
                pool,
                batch * config.actor_rollout_ref.rollout.n,
                f"a batch of {role} (data.train_batch_size x rollout.n)",
            )
    _check_loads(config, placement, knobs)


def reward_model_devices(config: DictConfig) -> int:
    """Devices of a reward model, which are beside those of the pipeline's pools; 0 without one.

    Raises ConfigError: it is to share devices with training, or cannot serve while answers are generated.
    """
    path = "reward.reward_model"
    model = config.reward.reward_model
    if not model.enable:
        return 0
    if not model.enable_resource_pool:
        raise ConfigError(
            f"{path}.enable_resource_pool must be True, got {model.enable_resource_pool}; a reward model "
            "scores while the "
            f"trainer trains, so give it devices of its own by {path}.nnodes and {path}.n_gpus_per_node"
        )
    for name in ("nnodes", "n_gpus_per_node"):
        if not _positive(model[name]):
            raise ConfigError(
                f"{path}.{name} must be >= 1, got {model[name]!r}; say how many devices the reward model has"
            )
    if model.rollout.free_cache_engine:
        raise ConfigError(
            f"{path}.rollout.free_cache_engine must be False, got True; on devices of its own the model "
            "never makes room"
        )
    devices, tp = int(model.nnodes * model.n_gpus_per_node), model.rollout.tensor_model_parallel_size
    if tp < 1 or devices % tp:
        raise ConfigError(
            f"{path}.rollout.tensor_model_parallel_size must divide its {devices} devices, got {tp}; set "
            "it to 1"
        )
    return devices


def _check_loads(config: DictConfig, placement: Placement, knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError: a forward-only model is to load published weights, and cannot."""
    every = knobs.training.ref_refresh_every
    if every and not need_reference_policy(config):
        raise ConfigError(
            f"{OWN}.training.ref_refresh_every must be 0 without a reference policy, got {every}; "
            "set actor_rollout_ref.actor.use_kl_loss=True for one"
        )
    strategy, rank = config.actor_rollout_ref.actor.strategy, _adapter_rank(config)
    cases = (
        (placement.own_pool_of("logp") is not None, "logp", "let logp share the training devices"),
        (every > 0, "ref_logp", f"leave {OWN}.training.ref_refresh_every out"),
    )
    for loads, role, other in cases:
        if loads and strategy != "fsdp2":
            raise ConfigError(
                f"actor_rollout_ref.actor.strategy must be fsdp2 where {role} loads published weights, got "
                f"{strategy}; set it, or {other}"
            )
        if loads and rank:
            raise ConfigError(
                f"actor_rollout_ref.model LoRA rank {rank} cannot be combined with {role} loading "
                f"published weights yet; {other}, or train without LoRA"
            )


def _adapter_rank(config: DictConfig) -> int:
    model = config.actor_rollout_ref.model
    return int(OmegaConf.select(model, "lora.rank") or model.get("lora_rank") or 0)


def _check_adapters(config: DictConfig) -> None:
    """Raises ConfigError: a LoRA adapter that the pipeline cannot publish."""
    model, rank = config.actor_rollout_ref.model, _adapter_rank(config)
    if rank and need_reference_policy(config):
        raise ConfigError(
            f"actor_rollout_ref.model LoRA rank {rank} cannot be combined with a reference policy yet, got "
            "use_kl_loss or use_kl_in_reward; turn them off"
        )
    if not rank or OmegaConf.select(model, "lora.merge"):
        return
    load_format = OmegaConf.select(config, f"{ROLLOUT}.load_format")
    if load_format in (None, "dummy"):
        raise ConfigError(
            f"{ROLLOUT}.load_format must not be dummy for LoRA adapters, whose base is never published, got "
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
        "trainer.v1.trainer_mode",
        lambda v: v == "sync",
        "must be left alone",
        "async_strategy says which trainer runs",
    ),
    (f"{_ENGINE}.backend", lambda v: v in ("naive", "dual_buffer"), "must be dual_buffer", "leave it out"),
    (
        f"{_ENGINE}.update_weights_bucket_megabytes",
        lambda v: v == 2048,
        "must be left alone",
        f"set {OWN}.weight_sync.gather_bucket_size_mb instead",
    ),
    (
        f"{ROLLOUT}.agent.agent_loop_manager_class",
        lambda v: v in (None, MANAGER),
        "must be left alone",
        "the pipeline's own manager says when a group is complete",
    ),
    (f"{ROLLOUT}.n", _positive, "must be >= 1", "answers to each prompt"),
    ("data.train_batch_size", _positive, "must be >= 1", "prompts of one optimizer step"),
    (
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        _positive,
        "must be >= 1",
        "prompts of one optimizer update",
    ),
    (
        f"{ROLLOUT}.max_num_seqs",
        _positive,
        "must be >= 1",
        "answers that a replica works on at the same time",
    ),
    (f"{ROLLOUT}.tensor_model_parallel_size", _whole, "must be a whole number", "devices of one replica"),
    ("critic.ppo_mini_batch_size", _positive, "must be >= 1", "prompts of one update of the critic"),
    ("trainer.critic_warmup", _whole_or_none, "must be >= 0", "steps that the critic learns alone"),
    ("actor_rollout_ref.model.lora_rank", _whole_or_none, "must be >= 0", "0 trains all weights"),
    ("actor_rollout_ref.model.lora.rank", _whole_or_none, "must be >= 0", "0 trains all weights"),
    ("ray_kwargs.ray_init.num_gpus", _whole_or_none, "must be >= 0", "devices that Ray is told of"),
    ("reward.num_workers", _positive, "must be >= 1", "somebody has to score"),
    (
        "trainer.total_training_steps",
        lambda v: v is None or _positive(v),
        "must be >= 1",
        "leave it out to train by epochs",
    ),
    ("trainer.use_v1", lambda v: v is True, "must be True", "the pipeline builds on verl's V1 trainer"),
    (f"{ROLLOUT}.name", lambda v: v == "vllm", "must be vllm", "other engines are not supported yet"),
    (f"{ROLLOUT}.mode", lambda v: v == "async", "must be async", "remove the override"),
    (f"{ROLLOUT}.data_parallel_size", lambda v: v == 1, "must be 1", "use more replicas instead"),
    (
        f"{ROLLOUT}.pipeline_model_parallel_size",
        lambda v: v == 1,
        "must be 1",
        "use tensor parallelism or more replicas instead",
    ),
    (f"{ROLLOUT}.disaggregation.enabled", lambda v: not v, "must be False", "it is not supported yet"),
    (
        "actor_rollout_ref.actor.strategy",
        lambda v: v in ("fsdp", "fsdp2"),
        "must be fsdp or fsdp2",
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
