# SPDX-License-Identifier: Apache-2.0
"""A server prepares and commits each version once, in order, also if calls are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import LoadReport
from recipe.async_pipeline.errors import EngineDeadError, ProofError, WaitTimeout, WeightSyncError
from recipe.async_pipeline.verl_bridge.paced_starts import PER_TURN, PacedStarts
from recipe.async_pipeline.weight_sync.busy_time import OpenTime
from recipe.async_pipeline.weight_sync.manifest import (
    BucketEntry,
    Manifest,
    WeightTicket,
    decode,
    encode,
    over_nodes,
)
from recipe.async_pipeline.weight_sync.preparation import Preparation
from recipe.async_pipeline.weight_sync.staging import StagingBoard
from recipe.async_pipeline.weight_sync.versioned_engine import LoadMode
from tests.conftest import Load
from tests.fakes import buckets

pytestmark = pytest.mark.real_engine
HOW = LoadMode("keep", "host", False)
PREPARE_S, COMMIT_S = 5.0, 2.0


@pytest.fixture(scope="module")
def module(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.rollout.vllm.server")


class Engine:
    """Stands for the engine behind `VersionedEngine`: loads in two seconds and counts its loads."""

    def __init__(self) -> None:
        self.loads: list[int] = []
        self.error: Exception | None = None

    async def load(
        self, version: int, load: Callable[[], Any], in_flight: str, *, reuse_prefixes: bool
    ) -> tuple[Any, int]:
        self.loads.append(version)
        await asyncio.sleep(COMMIT_S)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(reports=[LoadReport(stall_s=0.5, prove_s=0.1, tensors_proved=3)]), 7


class Memories:
    """Stand for the memory services; record which versions they may overwrite."""

    def __init__(self) -> None:
        self.released: list[Any] = []

    async def release(self, reader: object, version: int) -> None:
        self.released.append(version)


@pytest.fixture
def server(module: ModuleType) -> Any:
    one = object.__new__(module.PipelineVLLMServer)
    one.replica_rank, one.node_rank, one.global_steps = 0, 0, None
    one.engine = SimpleNamespace(errored=False)
    one._preparation, one._committing, one._report = Preparation("replica 0"), asyncio.Lock(), None
    one._open, one._versioned, one.prepared = OpenTime(), Engine(), []
    one._reader, one.memories = "this process", Memories()

    async def prepare(offered: WeightTicket, *rest: Any) -> Any:
        one.prepared.append(offered.version)
        await asyncio.sleep(PREPARE_S)
        from recipe.async_pipeline.verl_bridge.rollout.versioned_server import Prepared

        return Prepared(b"manifest", memories=one.memories, transfer_s=1.0, stage_s=4.0)

    one._prepare = prepare
    return one


def prepare(server: Any, version: int) -> Any:
    ticket = WeightTicket(version=version, board="b", pid=1, num_bytes=8, gather_s=0.1)
    return server.prepare_version(ticket, None, 10.0, "host")


def commit(server: Any, version: int) -> Any:
    return server.commit_version(version, 64, 10.0, HOW)


def test_a_version_is_served_by_its_commit_and_not_before(server: Any) -> None:
    async def scenario() -> None:
        await prepare(server, 3)
        assert (server.global_steps, server._versioned.loads, server.memories.released) == (None, [], [])
        report = await commit(server, 3)
        assert (server.global_steps, server.memories.released) == (3, [3])
        assert (report.transfer_s, report.stall_s, report.tokens_read_again) == (1.0, 0.5, 7)
        assert report.load_s == pytest.approx(4.0 + report.commit_s)

    run_virtual(scenario())


def test_the_first_server_has_a_version_brought_to_every_node_of_its_replica(server: Any) -> None:
    from recipe.async_pipeline.verl_bridge.rollout.versioned_server import FurtherServer

    class OfHosts(Memories):
        async def fetch(
            self, ticket: WeightTicket, reader: str, timeout_s: float, node: str = "n0"
        ) -> Manifest:
            return Manifest(ticket.version, (), (BucketEntry(f"{reader}'s on {node}", 0, 0),), ())

        async def release(self, reader: object, version: int, node: str = "n0") -> None:
            self.released.append((reader, node, version))

    async def scenario() -> None:
        loaded: list[bytes] = []

        async def load_into_engine(manifest: bytes, *_: Any) -> None:
            loaded.append(manifest)

        async def load(version: int, load: Callable[[], Any], *_: Any, **__: Any) -> tuple[Any, int]:
            await load()
            return SimpleNamespace(reports=[LoadReport()]), 0

        memories = OfHosts()
        del server._prepare
        server._load_into_engine, server._death = load_into_engine, lambda: None
        server._versioned = SimpleNamespace(load=load, salts=lambda version: None)
        await server.join([FurtherServer(None, "n1", "that process"), FurtherServer(None, "n2", "a third")])  # type: ignore[arg-type]
        ticket = WeightTicket(version=3, board="b", pid=1, num_bytes=8, gather_s=0.1)
        await server.prepare_version(ticket, memories, 10.0, "host")
        await commit(server, 3)
        found = [decode(loaded[0]).on_node(node).buckets[0].segment for node in range(3)]
        assert found == ["this process's on n0", "that process's on n1", "a third's on n2"]
        assert memories.released == [
            ("this process", "n0", 3),
            ("that process", "n1", 3),
            ("a third", "n2", 3),
        ]

    run_virtual(scenario())


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_maps_the_segments_on_its_node(load: Load, node: int) -> None:
    mapped: list[str] = []

    def commit(described: Manifest, piece_bytes: int) -> None:
        mapped.extend(bucket.segment for bucket in described.buckets)
        raise WeightSyncError("enough")

    worker_class = load("recipe.async_pipeline.verl_bridge.rollout.vllm.worker").PipelineWorkerExtension
    worker = object.__new__(worker_class)
    worker.parallel_config = SimpleNamespace(node_rank=node)
    worker._adapter = SimpleNamespace(commit=commit, prepare=lambda described, done: commit(described, 0))
    nodes = [Manifest(1, (), (BucketEntry(f"of node {one}", 0, 0),), ()) for one in range(2)]
    manifest = encode(over_nodes(nodes))
    with pytest.raises(WeightSyncError, match="enough"):
        worker.load_snapshot(manifest, 64)
    with pytest.raises(WeightSyncError, match="enough"):
        worker.stage_snapshot(manifest)
    assert mapped == [f"of node {node}"] * 2


def test_repeated_calls_prepare_and_load_once(server: Any) -> None:
    async def scenario() -> None:
        await asyncio.gather(prepare(server, 3), prepare(server, 3))
        first, second = await asyncio.gather(commit(server, 3), commit(server, 3))
        await prepare(server, 3)
        assert first is second is await commit(server, 3)
        assert (server.prepared, server._versioned.loads) == ([3], [3])

    run_virtual(scenario())


def test_a_commit_needs_the_preparation_of_the_same_version(server: Any) -> None:
    async def scenario() -> None:
        refused = "replica 0 cannot load v4, which it has not prepared"
        with pytest.raises(WeightSyncError, match=refused):
            await commit(server, 4)
        await prepare(server, 3)
        with pytest.raises(WeightSyncError, match=refused):
            await commit(server, 4)
        preparing = asyncio.create_task(prepare(server, 4))
        await asyncio.sleep(1)
        with pytest.raises(WeightSyncError, match=refused):
            await commit(server, 4)
        await preparing
        await commit(server, 4)
        assert server._versioned.loads == [4]

    run_virtual(scenario())


def test_versions_only_move_forward(server: Any) -> None:
    async def scenario() -> None:
        await prepare(server, 3)
        await commit(server, 3)
        with pytest.raises(WeightSyncError, match="replica 0 serves v3 and was offered v2"):
            await prepare(server, 2)

    run_virtual(scenario())


def test_a_load_that_fails_serves_nothing_and_can_be_repeated(server: Any) -> None:
    async def scenario() -> None:
        await prepare(server, 3)
        server._versioned.error = ProofError("v3: other values")
        with pytest.raises(ProofError):
            await commit(server, 3)
        assert server.global_steps is None
        server._versioned.error = None
        await commit(server, 3)
        assert server.global_steps == 3

    run_virtual(scenario())


def test_a_control_call_runs_between_requests_that_arrive_together(
    server: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    async def generate(self: Any, *, request_id: str) -> Any:
        begun.append(request_id)
        return SimpleNamespace(extra_fields={})

    (stock,) = {cls for cls in module.PipelineVLLMServer.__mro__ if cls.__name__ == "vLLMHttpServer"}
    monkeypatch.setattr(stock, "generate", generate)
    server._starts, server._answering, server._given_up, server.global_steps = PacedStarts(), {}, {}, 3

    async def scenario() -> int:
        requests = [asyncio.ensure_future(server.generate(request_id=str(i))) for i in range(100)]

        async def check() -> int:
            return len(begun)

        control = asyncio.ensure_future(check())
        await asyncio.gather(*requests)
        return await control

    assert run_virtual(scenario()) <= PER_TURN
    assert begun == [str(i) for i in range(100)]


# Versions that are staged on the devices.


@pytest.fixture
def staging(server: Any) -> Any:
    """A server whose engine stages as `server.boards` says."""
    del server._prepare
    manifest = buckets.manifest(3)

    async def fetch(*rest: Any) -> Any:
        return manifest

    async def boards(encoded: bytes, timeout_s: float) -> Any:
        return await server.boards()

    server.memories.fetch, server._stage_boards = fetch, boards
    return server


def stage(server: Any) -> str:
    ticket = WeightTicket(version=3, board="b", pid=1, num_bytes=8, gather_s=0.1)
    why: str = run_virtual(server.prepare_version(ticket, server.memories, 10.0, "device"))
    return why


def test_a_staging_that_fails_on_a_rank_leaves_the_version_prepared(staging: Any) -> None:
    ranks = [StagingBoard(), StagingBoard()]
    ranks[0].post(3, None)
    ranks[1].post(3, torch.OutOfMemoryError("CUDA out of memory"))

    async def boards() -> list[str]:
        return [rank.name for rank in ranks]

    staging.boards = boards
    try:
        assert stage(staging) == "OutOfMemoryError: CUDA out of memory"
    finally:
        for rank in ranks:
            rank.close()
    run_virtual(commit(staging, 3))
    assert (staging.global_steps, staging._versioned.loads) == (3, [3])


def test_a_staging_that_an_engine_refuses_leaves_the_version_prepared(staging: Any) -> None:
    async def refused() -> list[str]:
        raise RuntimeError("worker failed with error 'out of memory'")

    staging.boards = refused
    assert stage(staging) == "RuntimeError: worker failed with error 'out of memory'"
    run_virtual(commit(staging, 3))
    assert staging.global_steps == 3


def test_a_stuck_engine_fails_the_preparation(staging: Any) -> None:
    async def stuck() -> list[str]:
        await asyncio.sleep(1e6)
        return []

    staging.boards = stuck
    with pytest.raises(WaitTimeout, match="to copy version 3 to the device"):
        stage(staging)


def test_a_dead_engine_fails_the_preparation(staging: Any) -> None:
    async def dead() -> list[str]:
        staging.engine = SimpleNamespace(errored=True, dead_error=EngineDeadError("the engine is dead"))
        raise RuntimeError("worker failed")

    staging.boards = dead
    with pytest.raises(RuntimeError, match="worker failed"):
        stage(staging)
