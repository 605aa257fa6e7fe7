# SPDX-License-Identifier: Apache-2.0
"""What verl's keys of a distillation must say. verl would find most of it after a minute, in the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import ConfigError
from ..paths import select
from .refusals import Refusal, Settings, any_of, must_be, must_be_one_of, must_be_positive, other_than, refuse

SECTION = "distillation"
MODELS, LOSS = f"{SECTION}.teacher_models", f"{SECTION}.distillation_loss"
DEFAULT = "teacher_model"
"""verl's entry of a single teacher; it does not count once there are others."""
TOPK = "forward_kl_topk"
LOSSES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", TOPK)
"""verl's losses of distillation."""
VERLS_TENSOR_SIZE = 2
"""verl's default for a teacher that is added without this size."""
_SIZES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")

DEVICES: tuple[Refusal, ...] = tuple(
    must_be_positive(f"{SECTION}.{key}", "set the devices of the teachers")
    for key in ("nnodes", "n_gpus_per_node")
)
ELSEWHERE: tuple[Refusal, ...] = (
    must_be(f"{SECTION}.nnodes", 0, remedy="set it", where="with teachers that other servers serve"),
)
ROWS: tuple[Refusal, ...] = (
    Refusal(
        "actor_rollout_ref.rollout.name",
        other_than("diffusers"),
        f"must not be diffusers with {SECTION}.enabled, since images have no teacher",
        f"set {SECTION}.enabled=False",
    ),
    Refusal(
        "actor_rollout_ref.actor.policy_loss.topr_split",
        other_than("score"),
        f"must not be score with {SECTION}.enabled, since verl's loss of distillation gets no scores",
        "use advantage",
    ),
    must_be_one_of(f"{LOSS}.policy_loss_mode", ("vanilla",), "verl has no other one with a teacher"),
    Refusal(
        f"{LOSS}.loss_mode",
        other_than("k1"),
        f"must not be k1 with {LOSS}.use_policy_gradient=False, since its gradient does not depend on the "
        "teacher",
        f"use k3 or {TOPK}, or {LOSS}.use_policy_gradient=True",
        when=lambda at: not at[f"{LOSS}.use_policy_gradient"],
    ),
    must_be_positive(f"{LOSS}.topk", "set the number of likely tokens that the teacher returns")._replace(
        when=lambda at: at[f"{LOSS}.loss_mode"] == TOPK
    ),
)


def teachers_of(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the sections of the teachers by name; none without distillation. `config`: verl's, resolved."""
    found: Mapping[str, Any] = select(config, MODELS) or {}
    if not select(config, f"{SECTION}.enabled"):
        return {}
    return {name: one for name, one in found.items() if len(found) == 1 or name != DEFAULT}


def servers_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the addresses of servers that serve teachers, by the name of the teacher."""
    paths = {name: str(one.get("model_path")) for name, one in teachers_of(config).items()}
    return {name: path for name, path in paths.items() if path.startswith(("http://", "https://"))}


def check_teachers(config: Mapping[str, Any]) -> None:
    """Raises ConfigError if a run could not distil as its resolved config says."""
    if not select(config, f"{SECTION}.enabled"):
        return
    refuse((*(ELSEWHERE if servers_of(config) else DEVICES), *ROWS), Settings(config))
    if problems := [*_problems(config)]:
        raise ConfigError(*problems)


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    loss, known = select(config, f"{LOSS}.loss_mode"), select(config, "actor_rollout_ref.model.external_lib")
    if not known and not any_of(*LOSSES)(loss):
        yield f"{LOSS}.loss_mode must be one of {', '.join(LOSSES)}, got {loss!r}; correct it"
    teachers = teachers_of(config)
    several = len(teachers) > 1
    if (elsewhere := servers_of(config)) and (own := teachers.keys() - elsewhere):
        yield (
            f"{MODELS} must be served by this run, or all by other servers, got {len(own)} by this run and "
            f"{len(elsewhere)} by others; serve {', '.join(sorted(own))} elsewhere too"
        )
    keys = Counter(str(one.get("key")) for one in teachers.values())
    length = sum(int(select(config, f"data.max_{part}_length")) for part in ("prompt", "response")) + 1
    for name, one in teachers.items():
        path, inference = f"{MODELS}.{name}", one.get("inference") or {}
        if (engine := inference.get("name")) not in ("vllm", "sglang"):
            yield f"{path}.inference.name must be vllm or sglang, got {engine!r}; set it"
        if several and (one.get("key") is None or keys[str(one.get("key"))] > 1):
            yield (
                f"{path}.key must name the value of the data's {select(config, f'{SECTION}.teacher_key')} "
                f"that this teacher is for, and no other has, got {one.get('key')!r}; set it"
            )
        if (most := inference.get("max_model_len")) is not None and int(most) < length:
            yield (
                f"{path}.inference.max_model_len must be at least {length}, a prompt, a response and a "
                f"token, got {most}; raise it"
            )
    devices = int(select(config, f"{SECTION}.nnodes")) * int(select(config, f"{SECTION}.n_gpus_per_node"))
    sizes = {name: _devices(one) for name, one in teachers.items()}
    if (
        several
        and (needed := sum(int(teachers[n].get("num_replicas") or 0) * s for n, s in sizes.items()))
        != devices
    ):
        each = ", ".join(f"{n} {teachers[n].get('num_replicas')} x {s}" for n, s in sizes.items())
        yield (
            f"{SECTION}.nnodes x {SECTION}.n_gpus_per_node must be the {needed} devices of all replicas of "
            f"teachers ({each}), got {devices}; change it, or their num_replicas"
        )
    elif not several and (size := next(iter(sizes.values()))) and devices % size:
        yield (
            f"{SECTION}.nnodes x {SECTION}.n_gpus_per_node must be a multiple of the {size} devices of a "
            f"replica of the teacher, got {devices}; change it, or its tensor_model_parallel_size"
        )


def _devices(teacher: Mapping[str, Any]) -> int:
    """Return the devices of one replica."""
    inference = {_SIZES[0]: VERLS_TENSOR_SIZE, **(teacher.get("inference") or {})}
    tensor, data, pipeline = (int(inference.get(key) or 1) for key in _SIZES)
    return tensor * data * pipeline
