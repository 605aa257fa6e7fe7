# SPDX-License-Identifier: Apache-2.0
"""Check that samples divide over a pool and that replicas fill it; an error names the nearest sizes."""

from __future__ import annotations

from ..errors import ConfigError
from .placement import Pool


def check_divides(pool: Pool, samples: int, what: str, size: int = 1) -> None:
    """Raises ConfigError, with the nearest possible sizes, if a pool cannot divide `samples` evenly.

    `size` devices form one data-parallel rank: they share sequences, or hold one model together.
    """
    ranks = pool.devices // size
    if samples % ranks:
        fits = [n for n in range(1, samples + 1) if samples % n == 0]
        below = max(n for n in fits if n <= ranks) if ranks > 1 else 1
        above = min((n for n in fits if n > ranks), default=None)
        nearest = f"{below * size}" if above is None else f"{below * size} and {above * size}"
        units = f"{pool.devices} devices of pool {pool.name}"
        if size > 1:
            units = f"{ranks} data-parallel ranks ({units}, {size} for each rank)"
        raise ConfigError(
            f"{what}, {samples} samples, must be divisible by the {units}; nearest sizes are {nearest}"
            f"{' devices' if size > 1 else ''}"
        )


def divisor_below(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`, or 1."""
    return max((n for n in range(1, min(number, most) + 1) if number % n == 0), default=1)


def check_replicas(pool: Pool, size: int, path: str, devices: str = "") -> None:
    """Raises ConfigError if replicas of `size` devices do not fill the nodes of a pool.

    A replica does not span nodes. `path` is the key of `size`, `devices` the one of the devices of a node.
    """
    node = max(pool.per_node)
    across = f"{len(pool.per_node)} nodes of {node}" if len(pool.per_node) > 1 else f"{node}"
    if size > node and size > 1 and len(pool.per_node) > 1:
        raise ConfigError(
            f"{path} must be at most the {node} rollout devices of a node, got {size}: a replica over "
            f"several nodes is not supported yet; set it to {divisor_below(node, size)}"
            f"{devices and f', or raise {devices}'}"
        )
    if size < 1 or any(part % size for part in pool.per_node):
        below = node // max(size, 1) * size
        nearest = [n for n in (below, below + size) if n > 0] or [1]
        each = " on each node" if len(pool.per_node) > 1 else ""
        raise ConfigError(
            f"{path} must divide the {across} rollout devices, got {size}; set it to "
            f"{divisor_below(node, size)} or give the rollout {' or '.join(map(str, nearest))} devices{each}"
            f"{devices and f' with {devices}'}"
        )
