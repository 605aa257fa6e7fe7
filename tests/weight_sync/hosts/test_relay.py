# SPDX-License-Identifier: Apache-2.0
"""The tree of hosts, over all its sizes: no host sends to more than two, and every host is reached."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.hosts.relay import FAN_OUT, parent_of, tree


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
