# SPDX-License-Identifier: Apache-2.0
"""ROLL's keys of a run, of its losses and of the training strategy; a part of the table of `roll`."""

from __future__ import annotations

from typing import Any

from ...config.foreign_keys import Document, Outcome, Rule, by_hand, differs, nothing, one_of, only, to
from ...config.paths import select
from .rules import Table

_ACTOR = "actor_rollout_ref.actor"
TRAIN_STRATEGY = "actor_train.strategy_args.strategy_name"
MEGATRON = "megatron_train"
_TRANSFORMER = f"{_ACTOR}.megatron.override_transformer_config"
_FSDP = "the trainer shards by FSDP2, whose ranks are all data-parallel"
PRECISION = {"param_dtype": ("bf16", "bfloat16"), "reduce_dtype": ("fp32", "float32")}
"""verl's defaults of mixed precision, as ROLL may spell them."""
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
TRACKERS = {name: ["console", name] for name in ("wandb", "tensorboard", "swanlab")} | {"stdout": ["console"]}
"""The loggers of verl for each value of `track_with`."""
LATER = "verl has no such limit: apply it in the reward function, or in a custom estimator"


def by_engine(megatron: Rule, other: Rule) -> Rule:
    """Use one rule for files that train with Megatron, and the other one for the rest."""
    return lambda value, document: (megatron if trains_with_megatron(document) else other)(value, document)


def trains_with_megatron(document: Document) -> bool:
    """Return whether the file trains with Megatron."""
    return bool(select(document, TRAIN_STRATEGY) == MEGATRON)


def _resumed(value: Any, document: Document) -> Outcome:
    if isinstance(value, str):
        return Outcome("by hand", text="verl reads no checkpoint of ROLL; convert it to a model")
    return Outcome("set", {"trainer.resume_mode": "auto" if value else "disable"})


def _devices_of_a_node(value: Any, document: Document) -> Outcome:
    if select(document, "actor_train.device_mapping") is not None:
        return Outcome("nothing to do", text="the device_mapping of each worker says it")
    return Outcome("set", {"trainer.n_gpus_per_node": value})


def _schedule(path: str, *more: str) -> Rule:
    choices = SCHEDULES | {name: name for name in more}
    return one_of(choices, path, otherwise=f"set {path}: {', '.join(dict.fromkeys(choices.values()))}")


def _precision(name: str) -> Rule:
    def rule(value: Any, document: Document) -> Outcome:
        if value in PRECISION[name]:
            return Outcome("nothing to do", text="verl's default")
        text = f"set {name} in {_ACTOR}.fsdp_config.mixed_precision, next to the other dtypes there"
        return Outcome("by hand", text=text)

    return rule


def _parallel_size(name: str) -> Rule:
    """Megatron's sizes have the same names in verl's config."""
    return by_engine(to(f"{_ACTOR}.megatron.{name}"), only(1, "no model parallelism", _FSDP))


def _of_fsdp2(rule: Rule) -> Rule:
    """Use a rule for files that train with FSDP2: other strategies have no such key."""
    return lambda value, document: (rule if select(document, TRAIN_STRATEGY) == "fsdp2_train" else _other)(
        value, document
    )


def _other(value: Any, document: Document) -> Outcome:
    """Say what becomes of a key of the training strategy that has no rule."""
    if trains_with_megatron(document):
        text = f"if it is a field of megatron-core's transformer config, set it in {_TRANSFORMER}"
        return Outcome("by hand", text=text)
    return _unknown(value, document)


def _recompute(value: Any, document: Document) -> Outcome:
    found = {f"{_TRANSFORMER}.recompute_granularity": value}
    if value == "full":  # Megatron requires both of them with it
        found |= {f"{_TRANSFORMER}.recompute_method": "uniform", f"{_TRANSFORMER}.recompute_num_layers": 1}
    return Outcome("set", found)


def _unknown(value: Any, document: Document) -> Outcome:
    return Outcome("unknown", text="nothing is known of it")


STRATEGY: Table = (
    (
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size",
        _parallel_size("tensor_model_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size",
        _parallel_size("pipeline_model_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.virtual_pipeline_model_parallel_size",
        _parallel_size("virtual_pipeline_model_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.context_parallel_size",
        _parallel_size("context_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.expert_model_parallel_size",
        _parallel_size("expert_model_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.expert_tensor_parallel_size",
        _parallel_size("expert_tensor_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.sequence_parallel",
        by_engine(to(f"{_ACTOR}.megatron.sequence_parallel"), nothing(_FSDP)),
    ),
    (
        "actor_train.strategy_args.strategy_config.use_distributed_optimizer",
        by_engine(to(f"{_ACTOR}.megatron.use_distributed_optimizer"), nothing(_FSDP)),
    ),
    (
        "actor_train.strategy_args.strategy_config.recompute_granularity",
        by_engine(_recompute, nothing("gradient checkpointing recomputes whole layers")),
    ),
    ("actor_train.strategy_args.strategy_config.fsdp_size", _of_fsdp2(to(f"{_ACTOR}.fsdp_config.fsdp_size"))),
    (
        "actor_train.strategy_args.strategy_config.offload_policy",
        _of_fsdp2(to(f"{_ACTOR}.fsdp_config.offload_policy")),
    ),
    (
        "actor_train.strategy_args.strategy_config.reshard_after_forward",
        _of_fsdp2(to(f"{_ACTOR}.fsdp_config.reshard_after_forward")),
    ),
    ("actor_train.strategy_args.strategy_config.param_dtype", _of_fsdp2(_precision("param_dtype"))),
    ("actor_train.strategy_args.strategy_config.reduce_dtype", _of_fsdp2(_precision("reduce_dtype"))),
    (
        "actor_train.strategy_args.strategy_config.wrap_policy.*",
        _of_fsdp2(
            by_hand(f"set {_ACTOR}.fsdp_config.wrap_policy; by default the model's layers are wrapped")
        ),
    ),
    ("actor_train.strategy_args.strategy_config.*", _other),
)
"""Rules of the training strategy; the last one is for keys that have no other."""
RUN: Table = (
    ("defaults", by_hand("parts of other files: translate the composed configuration")),
    ("system_envs.*", by_hand("set these environment variables where the run starts")),
    ("num_gpus_per_node", _devices_of_a_node),
    ("resume_from_checkpoint", _resumed),
    ("track_with", one_of(TRACKERS, "trainer.logger", otherwise="set trainer.logger")),
    ("tracker_kwargs.*", by_hand("set trainer.project_name; loggers read the rest from the environment")),
    ("max_grad_norm", to(f"{_ACTOR}.optim.clip_grad", as_=float)),
    ("use_kl_loss", to(f"{_ACTOR}.use_kl_loss")),
    ("kl_loss_coef", to(f"{_ACTOR}.kl_loss_coef", as_=float)),
    ("add_token_level_kl", to("algorithm.use_kl_in_reward")),
    ("init_kl_coef", to("algorithm.kl_ctrl.kl_coef", as_=float, text="used with algorithm.use_kl_in_reward")),
    ("reward_clip", by_hand(LATER)),
    ("advantage_clip", by_hand(LATER)),
    (
        "reward_normalization.*",
        differs("grpo normalises within a group, by algorithm.norm_adv_by_std_in_grpo"),
    ),
    (
        "actor_train.training_args.lr_scheduler_type",
        by_engine(
            _schedule(f"{_ACTOR}.optim.lr_decay_style", "linear"),
            _schedule(f"{_ACTOR}.optim.lr_scheduler_type"),
        ),
    ),
    ("max_actions_per_traj", by_hand("it bounds an episode: see agentic.max_turns")),
    ("max_tokens_per_step", nothing("it is used where the file refers to it")),
)
"""Rules of keys that depend on few others."""
