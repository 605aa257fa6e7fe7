# SPDX-License-Identifier: Apache-2.0
"""A server prepares and commits each version once, in order, also if calls are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.core.groups.items import LoadReport
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import EngineDeadError, ProofError, WaitTimeout, WeightSyncError
from recipe.async_pipeline.verl_bridge.calls.control_calls import PER_TURN
from recipe.async_pipeline.weight_sync.engine.serving_rank import StagingBoard
from recipe.async_pipeline.weight_sync.engine.versioned_engine import Loaded, LoadMode
from recipe.async_pipeline.weight_sync.memory.manifest import BucketEntry, Manifest, WeightTicket, decode

pytestmark = [pytest.mark.real_engine, pytest.mark.virtual_time]
HOW = LoadMode("keep", "host", False)
FETCH_S, STAGE_S, COMMIT_S = 1.0, 4.0, 2.0


class Engine:
    """Stands for the engine behind `VersionedEngine`: loads in two seconds and counts its loads."""

    def __init__(self) -> None:
        self.loads: list[int] = []
        self.error: Exception | None = None
        self.death: Exception | None = None

    def salts(self, version: int) -> None:
        """Return none: no request waits."""

    async def load(
        self, version: int, load: Callable[[], Any], in_flight: str, *, reuse_prefixes: bool
    ) -> tuple[Any, int]:
        self.loads.append(version)
        loaded = await load()
        await asyncio.sleep(COMMIT_S)
        if self.error is not None:
            raise self.error
        return loaded, 7

    async def boards(self) -> list[str | None]:
        """Stage; by default, on a device that cannot."""
        await asyncio.sleep(STAGE_S)
        return [None]


class Memories:
    """Stand for the memory services; record which versions were fetched and may be overwritten."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.released: list[tuple[str, int]] = []

    async def fetch(self, ticket: WeightTicket, reader: Any, timeout_s: float, node: str = "n0") -> Manifest:
        if node == "n0":
            self.fetched.append(ticket.version)
        await asyncio.sleep(FETCH_S)
        return Manifest(ticket.version, (), (BucketEntry(f"of {node}", 0, 0),), ())

    async def release(self, reader: Any, version: int, node: str = "n0") -> None:
        self.released.append((node, version))


class StockServer:
    """Stands for an engine's server."""

    def __init__(self) -> None:
        self.replica_rank, self.node_rank, self.global_steps = 0, 0, None
        self.begun: list[str] = []

    async def generate(self, *, request_id: str) -> Any:
        self.begun.append(request_id)
        return SimpleNamespace(extra_fields={})


@pytest.fixture
def server(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    class Server(module.VersionedServer, StockServer):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.fake = self._versioned = Engine()
            self.memories, self.loaded = Memories(), list[bytes]()

        async def _load_into_engine(self, manifest: bytes, *rest: Any) -> Loaded:
            self.loaded.append(manifest)
            return Loaded([LoadReport(stall_s=0.5, prove_s=0.1, tensors_proved=3)], {})

        async def _stage_boards(self, manifest: bytes, timeout_s: float) -> list[str | None]:
            return await self.fake.boards()

        async def _answers(self) -> None: ...

        def _death(self) -> BaseException | None:
            return self.fake.death

    clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(module, "time", clock)
    return Server()


def prepare(server: Any, version: int, stage: str = "host") -> Any:
    ticket = WeightTicket(version=version, board="b", pid=1, num_bytes=8, gather_s=0.1)
    return server.prepare_version(ticket, server.memories, 10.0, stage)


def commit(server: Any, version: int) -> Any:
    return server.commit_version(version, 64, 10.0, HOW)


async def test_a_version_is_served_by_its_commit_and_not_before(server: Any) -> None:
    await prepare(server, 3, "device")
    assert (server.global_steps, server.fake.loads, server.memories.released) == (None, [], [])
    report = await commit(server, 3)
    assert (server.global_steps, server.memories.released) == (3, [("n0", 3)])
    assert (report.transfer_s, report.stall_s, report.tokens_read_again) == (FETCH_S, 0.5, 7)
    assert (report.load_s, report.commit_s) == (STAGE_S + COMMIT_S, COMMIT_S)


async def test_the_first_server_has_a_version_brought_to_every_node_of_its_replica(
    server: Any, module: ModuleType
) -> None:
    await server.join([module.FurtherServer(None, node, None) for node in ("n1", "n2")])
    await prepare(server, 3)
    await commit(server, 3)
    (loaded,) = server.loaded
    found = [decode(loaded).on_node(node).buckets[0].segment for node in range(3)]
    assert found == ["of n0", "of n1", "of n2"]
    assert server.memories.released == [("n0", 3), ("n1", 3), ("n2", 3)]


async def test_repeated_calls_prepare_and_load_once(server: Any) -> None:
    await asyncio.gather(prepare(server, 3), prepare(server, 3))
    first, second = await asyncio.gather(commit(server, 3), commit(server, 3))
    await prepare(server, 3)
    assert first is second is await commit(server, 3)
    assert (server.memories.fetched, server.fake.loads) == ([3], [3])


async def test_a_commit_needs_the_preparation_of_the_same_version(server: Any) -> None:
    refused = "replica 0 cannot load v4, which it has not prepared"
    with pytest.raises(WeightSyncError, match=refused):
        await commit(server, 4)
    await prepare(server, 3)
    with pytest.raises(WeightSyncError, match=refused):
        await commit(server, 4)
    preparing = asyncio.create_task(prepare(server, 4))
    await asyncio.sleep(FETCH_S / 2)
    with pytest.raises(WeightSyncError, match=refused):
        await commit(server, 4)
    await preparing
    await commit(server, 4)
    assert server.fake.loads == [4]


async def test_versions_only_move_forward(server: Any) -> None:
    await prepare(server, 3)
    await commit(server, 3)
    with pytest.raises(WeightSyncError, match="replica 0 serves v3 and was offered v2"):
        await prepare(server, 2)


async def test_a_load_that_fails_serves_nothing_and_can_be_repeated(server: Any) -> None:
    await prepare(server, 3)
    server.fake.error = ProofError("v3: other values")
    with pytest.raises(ProofError):
        await commit(server, 3)
    assert server.global_steps is None
    server.fake.error = None
    await commit(server, 3)
    assert server.global_steps == 3


async def test_a_control_call_runs_between_requests_that_arrive_together(server: Any) -> None:
    requests = [asyncio.ensure_future(server.generate(request_id=str(i))) for i in range(100)]

    async def check() -> int:
        return len(server.begun)

    control = asyncio.ensure_future(check())
    await asyncio.gather(*requests)
    assert await control <= PER_TURN
    assert server.begun == [str(i) for i in range(100)]


# Versions that are staged on the devices.


def stage(server: Any) -> str:
    why: str = run_virtual(prepare(server, 3, "device"))
    return why


def test_a_staging_that_fails_on_a_rank_leaves_the_version_prepared(server: Any) -> None:
    ranks = [StagingBoard(), StagingBoard()]
    ranks[0].post(3, None)
    ranks[1].post(3, torch.OutOfMemoryError("CUDA out of memory"))

    async def boards() -> list[str]:
        return [rank.name for rank in ranks]

    server.fake.boards = boards
    try:
        assert stage(server) == "OutOfMemoryError: CUDA out of memory"
    finally:
        for rank in ranks:
            rank.close()
    run_virtual(commit(server, 3))
    assert (server.global_steps, server.fake.loads) == (3, [3])


def test_a_staging_that_an_engine_refuses_leaves_the_version_prepared(server: Any) -> None:
    async def refused() -> list[str]:
        raise RuntimeError("worker failed with error 'out of memory'")

    server.fake.boards = refused
    assert stage(server) == "RuntimeError: worker failed with error 'out of memory'"
    run_virtual(commit(server, 3))
    assert server.global_steps == 3


def test_a_stuck_engine_fails_the_preparation(server: Any) -> None:
    async def stuck() -> list[str]:
        await asyncio.sleep(1e6)
        return []

    server.fake.boards = stuck
    with pytest.raises(WaitTimeout, match="to copy version 3 to the device"):
        stage(server)


def test_a_dead_engine_fails_the_preparation(server: Any) -> None:
    async def dead() -> list[str]:
        server.fake.death = EngineDeadError("the engine is dead")
        raise RuntimeError("worker failed")

    server.fake.boards = dead
    with pytest.raises(RuntimeError, match="worker failed"):
        stage(server)
