# SPDX-License-Identifier: Apache-2.0
"""Which host gets a version from which: a tree, so that the trainer's link carries a bucket at most twice."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import WeightSyncError

FAN_OUT = 2
"""Hosts that one host sends to."""


def tree(origin: str, receivers: Sequence[str]) -> tuple[str, ...]:
    """Return all hosts of a tree in order, its root first. A host that occurs twice counts once."""
    return tuple(dict.fromkeys((origin, *receivers)))


def parent_of(hosts: Sequence[str], host: str, fan_out: int = FAN_OUT) -> str | None:
    """Return the host from which `host` gets a version, or None for the root, `hosts[0]`.

    Raises WeightSyncError if `host` is not in the list.
    """
    if host not in hosts:
        raise WeightSyncError(f"host {host} is not among the {len(hosts)} hosts of this version")
    index = hosts.index(host)
    return None if index == 0 else hosts[(index - 1) // fan_out]
