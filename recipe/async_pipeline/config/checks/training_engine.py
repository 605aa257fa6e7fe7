# SPDX-License-Identifier: Apache-2.0
"""How many ranks of a training engine read different rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ..paths import select

ACTOR = "actor_rollout_ref.actor"
SHARDED = {"fsdp": "FSDP", "fsdp2": "FSDP2"}
DIVIDING = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
}
"""Kinds of parallelism that share one copy of a model, and their keys below `actor.megatron`."""
EXPERTS = {"expert": "expert_model_parallel_size", "expert-tensor": "expert_tensor_parallel_size"}
"""Kinds that divide experts over ranks which are data-parallel otherwise."""

OTHERS: Mapping[str, tuple[str, ...]] = {
    "veomni": ("veomni.ulysses_parallel_size",),
    "torchtitan": (
        "torchtitan.context_parallel_size",
        "torchtitan.tensor_parallel_size",
        "torchtitan.pipeline_parallel_size",
    ),
    "fsdp_turbo": ("fsdp_config.turbo_config.distributed.ulysses_parallel_size",),
}
"""Engines of verl that publish whole tensors, and the sizes that share a row, below the section of a model.
The first size divides sequences.
"""


def data_parallel(config: Mapping[str, Any], devices: int) -> int:
    """Return how many ranks of the engine that trains on this many devices read different rows."""
    strategy = str(select(config, f"{ACTOR}.strategy"))
    if strategy == "megatron":
        shared = prod(megatron_sizes(config)[kind] for kind in DIVIDING)
    elif strategy in OTHERS:
        shared = prod(int(select(config, f"{ACTOR}.{path}") or 1) for path in OTHERS[strategy])
    else:
        shared = ulysses(config)
    return max(1, devices // shared)


def ulysses(config: Mapping[str, Any]) -> int:
    """Return how many ranks share a sequence. verl lets the deprecated key win where it is above 1."""
    old, new = (
        int(select(config, f"{ACTOR}.{section}ulysses_sequence_parallel_size") or 1)
        for section in ("", "fsdp_config.")
    )
    return old if old > 1 else new


def megatron_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return Megatron's parallel sizes."""
    return {
        kind: int(select(config, f"{ACTOR}.megatron.{name}") or 1)
        for kind, name in {**DIVIDING, **EXPERTS}.items()
    }
