# SPDX-License-Identifier: Apache-2.0
"""A copy of the policy reports a version only if every rank holds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.verl_bridge.workers.policy_copy import PolicyCopy
from recipe.async_pipeline.weight_sync.manifest import WeightTicket
from recipe.async_pipeline.weight_sync.shard_load import RankLoad

TICKET, NEXT = (
    WeightTicket(version=version, board="b", pid=1, num_bytes=8, gather_s=0.1) for version in (4, 5)
)

MEMORIES: Any = object()


def copy_of(load: Any) -> PolicyCopy:
    return PolicyCopy("logp", SimpleNamespace(load_version=load))


def test_every_rank_loads_the_version() -> None:
    loads = []

    def load(*arguments: Any) -> list[RankLoad]:
        loads.append(arguments)
        return [RankLoad(4, 0), RankLoad(4, 3)]

    policy = copy_of(load)
    assert policy.version is None
    policy.load(TICKET, MEMORIES, 2.0)
    assert policy.version == 4
    assert loads == [(TICKET, MEMORIES, 2.0)]


def test_ranks_with_different_versions_are_an_error() -> None:
    policy = copy_of(lambda *arguments: [RankLoad(4, 1), RankLoad(3, 1)])
    with pytest.raises(
        WeightSyncError, match=r"logp should have loaded version 4, but its ranks hold \[3, 4\]"
    ):
        policy.load(TICKET, MEMORIES, 2.0)
    assert policy.version is None


def test_ranks_that_together_compared_nothing_are_an_error() -> None:
    policy = copy_of(lambda *arguments: [RankLoad(4, 0), RankLoad(4, 0)])
    with pytest.raises(ProofError, match="v4: nothing could be compared on any rank of logp"):
        policy.load(TICKET, MEMORIES, 2.0)
    assert policy.version is None


def test_no_version_is_held_after_a_failed_load() -> None:
    def load(*arguments: Any) -> list[RankLoad]:
        if policy.version is None and arguments[0] == NEXT:
            raise ProofError("differs")
        return [RankLoad(4, 1)]

    policy = copy_of(load)
    policy.load(TICKET, MEMORIES, 2.0)
    with pytest.raises(ProofError):
        policy.load(NEXT, MEMORIES, 2.0)
    assert policy.version is None
