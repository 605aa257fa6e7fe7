# SPDX-License-Identifier: Apache-2.0
"""ROLL's keys of a run and of its losses, each of which stands for itself; a part of the table of `roll`."""

from __future__ import annotations

from typing import Any

from ...config.foreign_keys import Document, Outcome, Rule, by_hand, differs, nothing, one_of, to
from ...config.paths import select
from .rules import Table

_ACTOR = "actor_rollout_ref.actor"
TRAIN_STRATEGY = "actor_train.strategy_args.strategy_name"
MEGATRON = "megatron_train"
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


RUN: Table = (
    ("defaults", by_hand("parts of other files: translate the composed configuration")),
    ("system_envs.*", by_hand("set these environment variables where the run starts")),
    ("num_gpus_per_node", _devices_of_a_node),
    ("resume_from_checkpoint", _resumed),
    ("track_with", one_of(TRACKERS, "trainer.logger", otherwise="set trainer.logger")),
    (
        "tracker_kwargs.*",
        by_hand("set trainer.project_name; loggers read the rest from the environment"),
    ),
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
    (
        "max_actions_per_traj",
        by_hand("it bounds an episode: see agentic.max_turns"),
    ),
    ("max_tokens_per_step", nothing("it is used where the file refers to it")),
)
"""Rules of keys that depend on few others."""
