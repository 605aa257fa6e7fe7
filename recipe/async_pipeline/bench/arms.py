# SPDX-License-Identifier: Apache-2.0
"""The arms: which trainer runs, on which devices, with what overrides. One literal table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..verl_bridge.rollout.vllm.plugin import IN_PROCESS

_ROLLOUT = "actor_rollout_ref.rollout"
_VLLM = f"{_ROLLOUT}.engine_kwargs.vllm"
_BRIDGE = "recipe.async_pipeline.verl_bridge"
DEVICES = 2
"""Every arm has these many, with one thread each; one has a third for a reference policy that waits."""

# What verl's own trainers need to run on a CPU at all, and what ours does by itself: no process between the
# engine core and its only worker.
_STOCK: dict[str, Any] = {
    f"{_VLLM}.worker_extension_cls": f"{_BRIDGE}.rollout.vllm.worker.PipelineWorkerExtension",
    f"{_VLLM}.distributed_executor_backend": IN_PROCESS,
}
# Both devices train, and both generate.
_SHARED: dict[str, Any] = {"trainer.n_gpus_per_node": DEVICES, f"{_ROLLOUT}.nnodes": 0}


class Arm(NamedTuple):
    """One trainer. The asynchronous ones of verl have as many batches in flight as ours at the same lag."""

    ours: bool
    shared_devices: bool
    """Training and generation take turns on all devices, instead of having one each."""
    batches_in_flight: int
    """Batches that may be between their first prompt and their optimizer step."""
    bounded_lag: bool
    """No answer is older than batches_in_flight - 1 versions; else the slow ones are overtaken, and age."""
    overrides: dict[str, Any]
    entry: str = f"{_BRIDGE}.bench.job"
    """Module that starts it."""


def _ours(strategy: str, max_lag: int, depth: int | None = None) -> Arm:
    overrides: dict[str, Any] = {"async_pipeline": True, "async_strategy": strategy}
    if strategy in ("n_step_ahead", "fully_async"):
        overrides["trainer.v1.async_pipeline.max_lag"] = max_lag
    if depth is not None:
        overrides["trainer.v1.async_pipeline.depth"] = depth
    ahead = max_lag if depth is None else depth
    return Arm(True, False, ahead + 1, ahead == max_lag, overrides)


_SEPARATE = _STOCK | {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.num_warmup_batches": 3,
    "trainer.v1.separate_async.parameter_sync_step": 1,
    "actor_rollout_ref.hybrid_engine": False,
    # Its transports want accelerators; ours goes through its own blocking manager.
    f"{_ROLLOUT}.checkpoint_engine.backend": "dual_buffer",
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": f"{_BRIDGE}.checkpoint_engine",
    f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.dual_buffer.rollout_dtype": "float32",
}
_COLOCATE = (
    _STOCK
    | _SHARED
    | {"trainer.v1.trainer_mode": "colocate_async", "trainer.v1.colocate_async.num_warmup_batches": 3}
)
# verl counts the step that trains: a span of 4 is a lag of 3. It then waits for answers that would get older.
_LAG_3 = {
    "trainer.v1.sampler.max_off_policy_threshold": 4,
    "trainer.v1.sampler.max_off_policy_strategy": "wait",
}

# `experimental/fully_async_policy`, which has an entry point and a configuration of its own. As many samples
# may be
# in flight or queued as in four batches; answers that a weight update interrupts go on.
_FULLY_ASYNC = _STOCK | {
    f"{_ROLLOUT}.checkpoint_engine.backend": "dual_buffer",
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": f"{_BRIDGE}.checkpoint_engine",
    f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.dual_buffer.rollout_dtype": "float32",
    "actor_rollout_ref.hybrid_engine": False,
    # Else it takes verl's agent loop of one turn, whatever the default is.
    f"{_ROLLOUT}.multi_turn.enable": True,
    "data.train_batch_size": 0,
    "data.gen_batch_size": 1,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 1,
    "async_training": {
        "staleness_threshold": 3.0,
        "trigger_parameter_sync_step": 1,
        "require_batches": 1,
        "partial_rollout": True,
        "use_trainer_do_validate": False,
        "use_dynamic_resource_scheduling": False,
        "dynamic_schedule_policy": "default",
        "dynamic_schedule_deactivate_ratio": 0.3,
        "dynamic_schedule_enable_rebalance": True,
        "concurrent_samples_per_replica": 32,
    },
}

_REF_APART: dict[str, Any] = {
    "trainer.v1.async_pipeline.pools": {
        "train": {"roles": ["train", "logp"], "devices": 1},
        "reference": {"roles": ["ref_logp"], "devices": 1},
        "generate": {"roles": ["generate"], "devices": 1},
    },
    # All devices, for the pools to deal out: these and the rollout's one.
    "trainer.n_gpus_per_node": DEVICES,
    "ray_kwargs.ray_init.num_gpus": DEVICES + 1,
}

ARMS: dict[str, Arm] = {
    "verl_sync": Arm(False, True, 1, True, _STOCK | _SHARED | {"trainer.v1.trainer_mode": "sync"}),
    "verl_colocate_async": Arm(False, True, 4, False, _COLOCATE),
    "verl_separate_async": Arm(False, False, 4, False, _SEPARATE),
    "verl_separate_async_lag3": Arm(False, False, 4, True, _SEPARATE | _LAG_3),
    "verl_fully_async": Arm(False, False, 4, False, _FULLY_ASYNC, f"{_BRIDGE}.bench.fully_async_job"),
    "on_policy": _ours("on_policy", 0),
    "one_step_off": _ours("one_step_off", 1),
    "n_step_ahead": _ours("n_step_ahead", 3),
    # As many groups on their way as in the arms with four batches; the slow ones may get as old as verl's do.
    "fully_async": _ours("fully_async", 6, depth=3),
    # The reference policy on a third logical device; for workloads in which it waits for other machines.
    "one_step_off_ref_apart": _ours("one_step_off", 1)._replace(
        overrides=_ours("one_step_off", 1).overrides | _REF_APART
    ),
    # Scores once a batch is generated, as where the reward model shares devices; for workloads whose judges
    # wait.
    "on_policy_rewards_late": _ours("on_policy", 0)._replace(
        overrides=_ours("on_policy", 0).overrides
        | {"trainer.v1.async_pipeline.reward_while_generating": False}
    ),
    # As old as answers get without a bound: the largest lag that was seen of verl's asynchronous trainers.
    "n_step_ahead_lag6": _ours("n_step_ahead", 6),
}

ASKED_FOR = ("n_step_ahead_lag6", "one_step_off_ref_apart", "on_policy_rewards_late")
"""These are for questions of their own."""
DEFAULT_ARMS = tuple(name for name in ARMS if name not in ASKED_FOR)


def parse_arms(text: str) -> list[str]:
    """`A,B,...` in the order in which they take turns. Raises ConfigError: unknown, repeated or none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigError(f"--arms must name each arm once, of {', '.join(ARMS)}; got {text!r}")
    return names


def hydra_overrides(values: Mapping[str, Any]) -> list[str]:
    """`++key=value` for each, whether or not the key is there already."""
    return [f"++{key}={_literal(value)}" for key, value in values.items()]


def _literal(value: Any) -> str:
    """hydra's grammar is close to JSON, but its mappings have bare keys."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_literal, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    # In quotes, a backslash is only special before a quote.
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"
