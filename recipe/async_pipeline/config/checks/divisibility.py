# SPDX-License-Identifier: Apache-2.0
"""Check that samples divide over a pool, that replicas fill it, and which engine of verl trains on it.

An error names the nearest sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ..paths import select
from ..placement import Pool


def check_divides(pool: Pool, samples: int, what: str, size: int = 1, remedy: str = "") -> None:
    """Raises ConfigError, with `remedy` or the nearest sizes of a pool, if it cannot divide `samples`.

    `size` devices form one data-parallel rank: they share sequences, or hold one model together.
    """
    ranks = pool.devices // size
    if samples % ranks:
        fits = [n for n in range(1, samples + 1) if samples % n == 0]
        below = max(n for n in fits if n <= ranks) if ranks > 1 else 1
        above = min((n for n in fits if n > ranks), default=None)
        nearest = f"{below * size}" if above is None else f"{below * size} or {above * size}"
        units = f"{pool.devices} devices of pool {pool.name}"
        if size > 1:
            units = f"{ranks} data-parallel ranks ({units}, {size} for each rank)"
        remedy = remedy or f"change its sizes, or give the pool {nearest} devices"
        raise ConfigError(f"{what}, {samples} samples, must be divisible by the {units}; {remedy}")


def divisor_below(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`, or 1."""
    return max((n for n in range(1, min(number, most) + 1) if number % n == 0), default=1)


def check_replicas(pool: Pool, size: int, path: str, devices: str = "") -> None:
    """Raises ConfigError if replicas of `size` devices do not fill the nodes of a pool.

    A replica is within a node, or takes whole nodes. `path` is the key of `size`, `devices` the one of the
    devices of a node.
    """
    node, nodes = max(pool.per_node), len(pool.per_node)
    if size > node and nodes > 1:
        _check_whole_nodes(node, nodes, size, path)
        return
    across = f"{nodes} nodes of {node}" if nodes > 1 else f"{node}"
    if size < 1 or any(part % size for part in pool.per_node):
        below = node // max(size, 1) * size
        nearest = [n for n in (below, below + size) if n > 0] or [1]
        each = " on each node" if nodes > 1 else ""
        raise ConfigError(
            f"{path} must divide the {across} rollout devices, got {size}; set it to "
            f"{divisor_below(node, size)} or give the rollout {' or '.join(map(str, nearest))} devices{each}"
            f"{devices and f' with {devices}'}"
        )


def _check_whole_nodes(node: int, nodes: int, size: int, path: str) -> None:
    """Raises ConfigError if replicas of more devices than a node has do not take whole nodes."""
    each = -(-size // node)
    if size % node:
        raise ConfigError(
            f"{path} must be a multiple of the {node} rollout devices of a node if a replica takes several "
            f"nodes, got {size}; set it to {(each - 1) * node} or {each * node}"
        )
    if nodes % each:
        below = nodes // each * each
        nearest = " or ".join(str(count) for count in (below, below + each) if count)
        raise ConfigError(
            f"{path} must divide the {nodes} nodes of {node} rollout devices, got {size}, which is {each} "
            f"nodes for each replica; set it to {divisor_below(nodes, each) * node}, or give the rollout "
            f"{nearest} nodes"
        )


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
