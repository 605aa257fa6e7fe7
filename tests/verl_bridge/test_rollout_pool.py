# SPDX-License-Identifier: Apache-2.0
"""Loads are rolling, bounded, and add up; weights stay on one host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import Publication
from recipe.async_pipeline.errors import ProofError, WaitTimeout, WeightSyncError
from recipe.async_pipeline.weight_sync.manifest import BucketEntry, Manifest, encode
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
MANIFEST = encode(Manifest(5, (), (BucketEntry("b", 300, 0), BucketEntry("c", 30, 0)), (), 0.25))


@pytest.fixture(scope="module")
def ours(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.rollout_pool")


class Server:
    """A server's handle: answers after `seconds`, keeps a log with everybody else."""

    def __init__(
        self, name: str, log: list[str], seconds: float = 2.0, error: Exception | None = None
    ) -> None:
        self.name, self.log, self.seconds, self.error = name, log, seconds, error
        self.load_version = SimpleNamespace(remote=self._remote)

    def _remote(
        self, manifest: bytes, piece_bytes: int, timeout_s: float
    ) -> asyncio.Future[dict[str, float]]:
        assert (manifest, piece_bytes, timeout_s) == (MANIFEST, 64, 10.0)
        return asyncio.ensure_future(self._load())

    async def _load(self) -> dict[str, float]:
        self.log.append(f"{self.name} begins")
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.log.append(f"{self.name} serves")
        return {"transfer_s": 0.5, "load_s": self.seconds, "prove_s": 0.1, "tensors_proved": 3.0}


def replica(rank: int, *servers: Server) -> Any:
    return SimpleNamespace(replica_rank=rank, servers=servers, workers=())


@pytest.fixture
def pool(ours: ModuleType) -> Callable[..., Any]:
    def make(*replicas: Any) -> Any:
        manager = SimpleNamespace(get_replicas=lambda: list(replicas))
        return ours.RolloutPool(manager, piece_bytes=64, timeout_s=10.0)

    return make


def test_replicas_load_one_after_another(pool: Callable[..., Any]) -> None:
    log: list[str] = []
    made = pool(replica(0, Server("a", log)), replica(1, Server("b", log)))
    assert run_virtual(made.publish(MANIFEST)) == Publication(
        version=5, num_bytes=330, gather_s=0.25, transfer_s=1.0, load_s=4.0, tensors_proved=6, replicas=2
    )
    assert log == ["a begins", "a serves", "b begins", "b serves"], "the pool never stands still as a whole"


def test_the_servers_of_one_replica_load_together(pool: Callable[..., Any]) -> None:
    log: list[str] = []
    publication = run_virtual(pool(replica(0, Server("a", log), Server("b", log))).publish(MANIFEST))
    assert log[:2] == ["a begins", "b begins"]
    assert publication.replicas == 1


def test_whoever_needs_the_weights_to_stay_can_hold_them(pool: Callable[..., Any]) -> None:
    log: list[str] = []
    made = pool(replica(0, Server("a", log)))

    async def main() -> None:
        async with made.weights:
            task = asyncio.create_task(made.publish(MANIFEST))
            await asyncio.sleep(100)
            assert log == []
        await task

    run_virtual(main())
    assert log == ["a begins", "a serves"]


def test_a_replica_that_does_not_answer_is_named(ours: ModuleType, pool: Callable[..., Any]) -> None:
    log: list[str] = []
    made = pool(replica(0, Server("a", log)), replica(1, Server("b", log, seconds=1e6)))
    limit = 10.0 + ours.GRACE_S
    with pytest.raises(WaitTimeout, match=f"waited {limit:g} s for replica 1 to load version 5"):
        run_virtual(made.publish(MANIFEST))
    assert not made.weights.locked()


def test_what_a_replica_raises_comes_through_and_stops_the_rest(pool: Callable[..., Any]) -> None:
    log: list[str] = []
    error = ProofError("v5: other values")
    made = pool(replica(0, Server("a", log, error=error)), replica(1, Server("b", log)))
    with pytest.raises(ProofError) as caught:
        run_virtual(made.publish(MANIFEST))
    assert caught.value is error
    assert log == ["a begins"], "a bad version is not offered to the others"


def test_a_pool_needs_a_replica(pool: Callable[..., Any]) -> None:
    with pytest.raises(WeightSyncError, match="no rollout replica was started"):
        pool()


def test_our_replicas_are_started(ours: ModuleType) -> None:
    assert ours.PipelineServerManager.rollout_replica_class is ours.PipelineVLLMReplica


@pytest.mark.parametrize(("trainers", "replicas"), [(["a"], ["a"]), (["a", "a"], ["a"]), ([], ["a"])])
def test_one_host_is_enough(ours: ModuleType, trainers: Sequence[str], replicas: Sequence[str]) -> None:
    ours.require_one_host(set(trainers), set(replicas))


@pytest.mark.parametrize(("trainers", "replicas"), [(["a"], ["b"]), (["a"], ["a", "b"]), (["a", "b"], ["a"])])
def test_several_hosts_are_refused(
    ours: ModuleType, trainers: Sequence[str], replicas: Sequence[str]
) -> None:
    with pytest.raises(WeightSyncError, match="must share one host, got 2 Ray nodes"):
        ours.require_one_host(set(trainers), set(replicas))
