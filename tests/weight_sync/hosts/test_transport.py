# SPDX-License-Identifier: Apache-2.0
"""A relay that fails, hangs or sends broken buckets costs time: the root has everything."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import permutations
from typing import Any

import pytest

from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.hosts.shares import Bucket
from recipe.async_pipeline.weight_sync.hosts.transport import (
    FAN_OUT,
    RELAY_ATTEMPTS,
    RELAY_S,
    Relayed,
    parent_of,
    tree,
)
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest

MANIFEST = Manifest(version=1, tensors=(), buckets=(), samples=())
FIRST, SECOND = Bucket(0, 0), Bucket(0, 1)


class Host:
    """A transport that records what was requested; it may be lost or hang."""

    def __init__(self, name: str) -> None:
        self.name, self.requested, self.state = name, list[tuple[Bucket, int]](), "up"

    async def announced(self) -> Manifest:
        assert self.name == "root", "a relay does not say what is correct"
        return MANIFEST

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        self.requested.append((bucket, attempt))
        if self.state == "lost":
            raise WeightSyncError(f"{self.name} is gone")
        if self.state == "hangs":
            await asyncio.Event().wait()
        return b"", self.name


def test_the_root_announces_and_the_parent_sends() -> None:
    root, parent = Host("root"), Host("parent")
    relayed = Relayed(root, parent)
    assert run_virtual(relayed.announced()) is MANIFEST
    assert run_virtual(relayed.bucket(FIRST, 0)) == (b"", "parent")
    assert root.requested == []


def test_without_a_parent_the_root_sends() -> None:
    assert run_virtual(Relayed(Host("root"), None).bucket(FIRST, 0)) == (b"", "root")


def test_a_bucket_that_came_broken_twice_comes_from_the_root() -> None:
    root, parent = Host("root"), Host("parent")
    relayed = Relayed(root, parent)
    came = [run_virtual(relayed.bucket(FIRST, attempt))[1] for attempt in range(4)]
    assert came == ["parent"] * RELAY_ATTEMPTS + ["root"] * (4 - RELAY_ATTEMPTS)
    assert run_virtual(relayed.bucket(SECOND, 0))[1] == "parent", "other buckets still come from the parent"


@pytest.mark.parametrize("state", ["lost", "hangs"])
@pytest.mark.virtual_time
async def test_a_relay_that_disappears_is_not_asked_again(state: str) -> None:
    root, parent = Host("root"), Host("parent")

    relayed, loop = Relayed(root, parent), asyncio.get_running_loop()
    assert (await relayed.bucket(FIRST, 0))[1] == "parent"
    parent.state = state
    # Both are on their way when it disappears.
    came = await asyncio.gather(relayed.bucket(FIRST, 0), relayed.bucket(SECOND, 0))
    assert [payload for _, payload in came] == ["root", "root"]
    took, requested = loop.time(), len(parent.requested)
    assert (await relayed.bucket(SECOND, 0))[1] == "root"
    assert len(parent.requested) == requested
    assert took == (RELAY_S if state == "hangs" else 0.0)


def test_the_error_of_the_root_propagates() -> None:
    root, parent = Host("root"), Host("parent")
    root.state = parent.state = "lost"
    with pytest.raises(WeightSyncError, match="root is gone"):
        run_virtual(Relayed(root, parent).bucket(FIRST, 0))


@pytest.mark.parametrize("number", range(1, 40))
@pytest.mark.parametrize("fan_out", [1, 2, 3])
def test_every_host_is_below_the_root_and_none_sends_to_too_many(number: int, fan_out: int) -> None:
    hosts = [f"host {i}" for i in range(number)]
    children = Counter(parent_of(hosts, host, fan_out) for host in hosts)
    assert children.pop(None) == 1
    assert all(below <= fan_out for below in children.values())
    for host in hosts:
        depth, above = 0, parent_of(hosts, host, fan_out)
        while above is not None:
            depth, above = depth + 1, parent_of(hosts, above, fan_out)
            assert depth < number, "no cycle"
        assert host == hosts[0] or depth >= 1
    assert FAN_OUT == 2


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_the_origin_is_the_root_in_any_order(order: tuple[str, ...]) -> None:
    hosts = tree("b", order)
    assert hosts[0] == "b" and sorted(hosts) == ["a", "b", "c"]
    assert parent_of(hosts, "b") is None
    assert {parent_of(hosts, "a"), parent_of(hosts, "c")} == {"b"}


def test_an_origin_without_consumers_is_the_root_too() -> None:
    assert tree("trainer", ("a", "b", "a")) == ("trainer", "a", "b")


def test_a_host_that_gets_no_version_has_no_parent() -> None:
    with pytest.raises(WeightSyncError, match="host d is not among the 3 hosts of this version"):
        parent_of(("a", "b", "c"), "d")
