# SPDX-License-Identifier: Apache-2.0
"""A server begins each request that a client may send, so that it knows the request when it is given up."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge.rollout.standalone_replica import OTHER_CALLS, BoundedReplica

pytestmark = pytest.mark.real_engine


class Verls:
    """Stands for verl's replica."""

    def __init__(self, rank: int, *, config: Any) -> None:
        self.rank, self.config = rank, config

    @property
    def max_concurrency(self) -> int:
        return 1000


class Replica(BoundedReplica, Verls):
    pass


@pytest.mark.parametrize(
    ("requests", "at_once"), [(8, 1000), (984, 1000), (985, 1001), (4096, 4096 + OTHER_CALLS)]
)
def test_verls_bound_is_raised_to_the_open_requests(requests: int, at_once: int) -> None:
    replica = Replica(3, config="c", max_open_requests=requests)
    assert (replica.rank, replica.config, replica.max_concurrency) == (3, "c", at_once)
