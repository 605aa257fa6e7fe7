# SPDX-License-Identifier: Apache-2.0
"""Training engines of verl other than Megatron, and their sizes that divide a model or a sequence."""

from __future__ import annotations

from collections.abc import Mapping

ACTOR = "actor_rollout_ref.actor"
SHARDED = {"fsdp": "FSDP", "fsdp2": "FSDP2"}
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
