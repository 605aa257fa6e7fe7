# SPDX-License-Identifier: Apache-2.0
"""Training engines of verl: the classes of their configurations, and the sizes of the ones other than
Megatron that divide a model or a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ..paths import select

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

CLASSES: Mapping[str, str] = {
    "megatron": "Mcore",
    "veomni": "VeOmni",
    "torchtitan": "TorchTitan",
    "dp": "FSDP",
}
"""How the names of verl's classes begin that `model_engine` chooses; all other engines have dp's."""


def check_class(config: Mapping[str, Any], section: str) -> None:
    """Raises ConfigError if the engine of a section is not the one that its configuration is for."""
    engine = str(select(config, f"{section}.strategy"))
    name = str(select(config, f"{section}._target_")).rpartition(".")[2]
    chosen = next((choice for choice, prefix in CLASSES.items() if name.startswith(prefix)), None)
    needed = engine if engine in CLASSES else "dp"
    if chosen is None or chosen == needed:
        return
    if chosen == "dp":
        raise ConfigError(
            f"{section}.strategy={engine} requires verl's config of {engine}, got the one of {name}; set "
            f"model_engine={engine}"
        )
    # With files that choose a strategy, such as this package's, the engine is the last word of the user.
    in_files = "; in files of this package, by training_engine=megatron" if chosen == "megatron" else ""
    raise ConfigError(
        f"{section}.strategy must be {chosen} with model_engine={chosen}, got {engine}; set it{in_files}"
    )
