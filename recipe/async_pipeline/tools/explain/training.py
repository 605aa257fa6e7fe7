# SPDX-License-Identifier: Apache-2.0
"""How a run trains, in words: its engine, the division of a model over devices, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config.checks.batch_sizes import training_ranks
from ...config.checks.divisibility import ACTOR, OTHERS, SHARDED
from ...config.checks.rollout_correction import PI_OLD, POLICY_LOSS, WITHOUT_RATIO
from ...config.checks.teachers import LOSS as TEACHERS_LOSS
from ...config.checks.teachers import TOPK, teachers_of
from ...config.keys.foreign_keys import LOSS_OF_VARIANT
from ...config.paths import select

MEGATRON_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert-tensor": "expert_tensor_parallel_size",
}
"""Kinds of parallelism, and their keys below `actor.megatron`."""


def describe_training(config: Mapping[str, Any], devices: int) -> str:
    """Return the engine that trains on this many devices, and its parallel sizes."""
    strategy = str(select(config, f"{ACTOR}.strategy"))
    if strategy == "megatron":
        return _megatron(config, devices)
    if strategy in OTHERS:
        rows = training_ranks(config, devices).number
        return f"{strategy}, data-parallel {rows}; whole tensors are published; not tested"
    size = select(config, f"{ACTOR}.fsdp_config.fsdp_size")
    shared = devices if size is None or not 0 < int(size) < devices else int(size)
    copies = f", {devices // shared} copies" if shared < devices else ""
    text = f"{SHARDED.get(strategy, strategy)}, weights sharded over {_count(shared)}{copies}"
    sharing = training_ranks(config, devices).sequence
    return text + (f", sequences over {sharing} (Ulysses)" if sharing > 1 else "")


def _megatron(config: Mapping[str, Any], devices: int) -> str:
    sizes = {kind: select(config, f"{ACTOR}.megatron.{name}") or 1 for kind, name in MEGATRON_SIZES.items()}
    parallel = [f"{kind}-parallel {size}" for kind, size in sizes.items() if int(size) > 1]
    return ", ".join(["Megatron", *parallel, f"data-parallel {training_ranks(config, devices).number}"])


def _count(devices: int) -> str:
    return "one device" if devices == 1 else f"{devices} devices"


def describe_teachers(config: Mapping[str, Any]) -> list[str]:
    """Describe what a run learns from teachers, a line for the loss and one for each; none without any."""
    teachers = teachers_of(config)
    if not teachers:
        return []
    mode = str(select(config, f"{TEACHERS_LOSS}.loss_mode"))
    over = (
        f" over {select(config, f'{TEACHERS_LOSS}.topk')} tokens" if mode == TOPK else " of the written token"
    )
    form = "an advantage" if select(config, f"{TEACHERS_LOSS}.use_policy_gradient") else "a loss"
    rewards = select(config, f"{TEACHERS_LOSS}.use_task_rewards")
    coefficient = select(config, f"{TEACHERS_LOSS}.distillation_loss_coef")
    added = (
        f"times {coefficient}, added to the loss of rewards" if rewards else "instead of the loss of rewards"
    )
    column = select(config, "distillation.teacher_key")
    rows = (f", for {column}={one.get('key')}" if len(teachers) > 1 else "" for one in teachers.values())
    return [
        f"{mode}{over} as {form}, {added}",
        *(f"teacher {one.get('model_path')}{row}" for one, row in zip(teachers.values(), rows, strict=True)),
    ]


def describe_loss(config: Mapping[str, Any], old_logp: str, mini_batches: int) -> str:
    """Describe the loss. `mini_batches` counts the optimizer updates of one epoch over a step."""
    mode = str(select(config, f"{POLICY_LOSS}.loss_mode"))
    called = next((variant for variant, name in LOSS_OF_VARIANT.items() if name == mode), None)
    name = mode if called in (None, mode) else f"{mode} (pg_variant {called})"
    if mode in WITHOUT_RATIO:
        return f"{name}: no ratio to an old policy"
    one_update = mini_batches == 1 and select(config, "actor_rollout_ref.actor.ppo_epochs") in (None, 1)
    always = (
        "; one update per step, so the ratio is 1" if old_logp in ("update", "trainer") and one_update else ""
    )
    return f"{name}: ratio of the current policy to {PI_OLD[old_logp]}{always}"
