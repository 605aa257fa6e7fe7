# SPDX-License-Identifier: Apache-2.0
"""Replicas load in turn; a failed replica is restarted; all get the memory services of their hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from ray.exceptions import RayTaskError

from recipe.async_pipeline.core.groups.items import LoadReport, Publication
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.weight_sync.engine.versioned_engine import LoadMode
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket

pytestmark = [pytest.mark.real_engine, pytest.mark.virtual_time]
TICKET = WeightTicket(version=5, board="b", pid=1, num_bytes=330, gather_s=0.25, host="a")


class Method:
    """`actor.method.remote(...)`, awaitable."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._function(*args))


class Answer(str):
    """An answer that is there already: for `ray.get`, and awaitable."""

    def __await__(self) -> Any:
        yield from ()
        return str(self)


class Server:
    """Stands for a server's handle: loads in two seconds, and writes a log that all servers share."""

    memories: ClassVar[list[Any]] = []
    """The memory services that the loads got."""
    dead: ClassVar[set[str]] = set()
    staged: ClassVar[list[str]] = []
    """Where each version was to wait for its load."""
    is_full: ClassVar[bool] = False
    """Whether the devices have no memory for another version."""

    def __init__(self, name: str, log: list[str], error: Exception | None = None, node: str = "a") -> None:
        self.name, self.log, self.error, self.node = name, log, error, node
        self.prepare_version, self.commit_version = Method(self._prepare), Method(self._commit)
        self.check = Method(self._check)
        self.__ray_call__ = SimpleNamespace(remote=lambda function: Answer(self.node))

    async def _check(self) -> None:
        if self.name in self.dead:
            raise RayTaskError("check", "a traceback", ValueError("the engine is dead")).as_instanceof_cause()

    async def _prepare(self, *arguments: Any) -> str:
        ticket, memories, timeout_s, stage = arguments
        assert timeout_s == 10.0
        self.staged.append(stage)
        self.memories.append((self.name, memories))
        self.log.append(f"{self.name} prepares")
        await asyncio.sleep(1.0)
        return "OutOfMemoryError: 1 GiB" if self.is_full and stage == "device" else ""

    async def _commit(self, *arguments: Any) -> LoadReport:
        assert arguments[1:] == (64, 10.0, LoadMode("abort", "device"))
        self.log.append(f"{self.name} begins")
        await asyncio.sleep(2.0)
        if self.error is not None:
            raise self.error
        self.log.append(f"{self.name} serves")
        return LoadReport(
            transfer_s=0.5,
            load_s=2.0,
            commit_s=1.5,
            stall_s=0.2,
            prove_s=0.1,
            busy_s=6.0,
            tensors_proved=3,
            elements_served=100,
            elements_explained=80,
            unexplained="head.weight",
            tokens_read_again=20,
        )


class Balancer:
    """Stands for the balancer's handle: records the servers that get requests."""

    def __init__(self) -> None:
        self.servers: dict[str, Any] = {}
        self.add_servers, self.remove_servers = Method(self._add), Method(self._remove)

    async def _add(self, servers: dict[str, Any]) -> None:
        self.servers.update(servers)

    async def _remove(self, names: list[str]) -> None:
        for name in names:
            del self.servers[name]


class Replica:
    next_node: str | None = None
    """Node of the servers after a restart, if it is another one."""

    def __init__(self, rank: int, *servers: Server) -> None:
        self.replica_rank, self.servers = rank, list(servers)
        self._server_address, self._server_handle = f"address {rank}", servers[0]

    async def end(self) -> None:
        pass

    async def start_again(self) -> None:
        (old,) = self.servers
        self.servers = [Server(f"{old.name}, restarted", old.log, node=self.next_node or old.node)]
        self._server_address, self._server_handle = f"{self._server_address}, restarted", self.servers[0]


class Services:
    """Stands for the memory services: says for which nodes they were."""

    closed: ClassVar[int] = 0

    def __init__(self, *, delta: bool) -> None:
        assert not delta, "off by default"

    def on(self, nodes: list[str], origins: list[str]) -> tuple[list[str], list[str]]:
        return nodes, origins

    async def close(self) -> None:
        Services.closed += 1


@pytest.fixture
def balancer() -> Balancer:
    return Balancer()


@pytest.fixture
def pool(module: ModuleType, balancer: Balancer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(module, "got", lambda refs, timeout_s, **names: list(refs))
    monkeypatch.setattr(module, "MemoryServices", Services)
    monkeypatch.setattr(Server, "memories", [])
    monkeypatch.setattr(Server, "staged", [])

    def make(*replicas: Replica, **more: Any) -> Any:
        balancer.servers = {replica._server_address: replica._server_handle for replica in replicas}
        manager = SimpleNamespace(get_replicas=lambda: list(replicas), global_load_balancer=balancer)
        return module.RolloutPool(
            manager,
            more.pop("say", lambda line: None),
            piece_bytes=64,
            load_timeout_s=10.0,
            restart_timeout_s=10.0,
            how=LoadMode("abort", "device"),
            **more,
        )

    return make


def test_replicas_prepare_together_and_load_one_after_another(pool: Callable[..., Any]) -> None:
    log: list[str] = []
    made = pool(Replica(0, Server("a", log)), Replica(1, Server("b", log)))

    assert run_virtual(made.publish(TICKET)) == Publication(
        version=5,
        num_bytes=330,
        gather_s=0.25,
        transfer_s=1.0,
        load_s=4.0,
        commit_s=3.0,
        stall_s=0.4,
        prove_s=0.2,
        busy_s=12.0,
        tensors_proved=6,
        elements_served=200,
        elements_explained=160,
        unexplained="head.weight",
        replicas=2,
        tokens_read_again=40,
    )

    assert log[:2] == ["a prepares", "b prepares"]
    assert log[2:] == ["a begins", "a serves", "b begins", "b serves"], "one serves while the other loads"


def test_the_first_server_of_a_replica_loads_for_the_ranks_of_all_its_nodes(
    pool: Callable[..., Any],
) -> None:
    log: list[str] = []
    publication = run_virtual(pool(Replica(0, Server("a", log), Server("b", log, node="n2"))).publish(TICKET))
    assert log == ["a prepares", "a begins", "a serves"]
    assert publication.replicas == 1


def test_a_replica_is_fenced_if_a_server_on_a_further_node_ends(
    pool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    replica = Replica(0, Server("a", log), Server("b", log, node="n2"))
    consumer = pool(replica).fleet.consumer("replica 0")
    run_virtual(consumer.check())
    monkeypatch.setattr(Server, "dead", {"b"})
    with pytest.raises(ValueError, match="the engine is dead"):
        run_virtual(consumer.check())


async def test_replicas_without_memory_for_staging_load_from_host_memory(
    pool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All serve meanwhile, one line says why, and a restart does not forget it."""
    monkeypatch.setattr(Server, "is_full", True)
    monkeypatch.setattr(Server, "dead", set())
    lines: list[str] = []
    notes: list[tuple[Any, ...]] = []

    def note(event: str, *what: Any, **fields: str) -> None:
        notes.append((event, *what, *fields.values()))

    made = pool(Replica(0, Server("a", [])), Replica(1, Server("b", [])), say=lines.append, note=note)
    watch = asyncio.create_task(made.watch())
    for version in (5, 6):
        publication = await made.publish(msgspec.structs.replace(TICKET, version=version))
        assert (publication.replicas, publication.failure) == (2, "")
    assert Server.staged == ["device"] * 2 + ["host"] * 2
    Server.dead.add("a")
    await asyncio.sleep(10)
    assert made.versions == {"replica 0": 6, "replica 1": 6}
    assert Server.staged[4:] == ["host"], "the restarted one"
    watch.cancel()
    await made.close()
    assert notes[:2] == [("UNSTAGED", f"replica {i}", 5, "OutOfMemoryError: 1 GiB") for i in range(2)]
    assert [event for event, *_ in notes[2:]] == ["FENCED", "REJOINED"]
    (line,) = [line for line in lines if "host memory" in line]
    assert line.startswith("replica 0 could not copy version 5 to its devices: OutOfMemoryError: 1 GiB; ")


async def test_a_replica_that_fails_gets_no_requests_until_it_serves_again(
    pool: Callable[..., Any], balancer: Balancer
) -> None:
    log: list[str] = []
    bad = Replica(0, Server("bad", log, error=ProofError("v5: other values")))

    made = pool(bad, Replica(1, Server("good", log)))
    publication = await made.publish(TICKET)
    assert publication.replicas == 1
    assert list(balancer.servers) == ["address 1"]
    await asyncio.sleep(10)
    assert list(balancer.servers) == ["address 1", "address 0, restarted"]
    assert balancer.servers["address 0, restarted"] is bad.servers[0]
    await made.close()
    assert log[-2:] == ["bad, restarted begins", "bad, restarted serves"]


async def test_an_engine_that_dies_between_weight_updates_is_replaced(
    pool: Callable[..., Any], balancer: Balancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[tuple[str, str, int | None]] = []
    monkeypatch.setattr(Server, "dead", set())

    made = pool(Replica(0, Server("a", [])), note=lambda *what: notes.append(what))
    watch = asyncio.create_task(made.watch())
    await made.publish(TICKET)
    await asyncio.sleep(10)
    assert notes == []
    Server.dead.add("a")
    await asyncio.sleep(10)
    assert list(balancer.servers) == ["address 0, restarted"]
    assert made.versions == {"replica 0": 5}
    watch.cancel()
    await made.close()
    assert notes == [("FENCED", "replica 0", None), ("REJOINED", "replica 0", 5)]


@pytest.fixture
def over_sockets(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[str, str]], set[str]]:
    """Calls that went over sockets, and the names of servers whose connection ends during a call."""
    calls: list[tuple[str, str]] = []
    lost = set[str]()

    class Caller:
        def __init__(self, server: Server) -> None:
            self.server = server

        async def call(self, method: str, *arguments: Any) -> Any:
            calls.append((self.server.name, method))
            if self.server.name in lost:
                raise module.ConnectionLost
            return await getattr(self.server, method).remote(*arguments)

    monkeypatch.setattr(module, "DirectCaller", Caller)
    monkeypatch.setattr(Server, "dead", set())
    return calls, lost


async def test_checks_go_over_sockets_and_ray_tells_why_a_server_has_ended(
    pool: Callable[..., Any], over_sockets: tuple[list[tuple[str, str]], set[str]]
) -> None:
    calls, lost = over_sockets

    made = pool(Replica(0, Server("a", []), Server("b", [])))
    consumer = made.fleet.consumer("replica 0")
    await consumer.check()
    assert sorted(calls) == [("a", "check"), ("b", "check")]

    lost.add("b")
    await consumer.check()  # its connection is lost, but it works
    Server.dead.add("b")
    with pytest.raises(ValueError, match="the engine is dead"):
        await consumer.check()


def test_weights_are_prepared_and_committed_over_sockets_and_otherwise_through_ray(
    pool: Callable[..., Any], over_sockets: tuple[list[tuple[str, str]], set[str]]
) -> None:
    calls, lost = over_sockets
    lost.add("b")
    log: list[str] = []
    made = pool(Replica(0, Server("a", log)), Replica(1, Server("b", log)))
    assert run_virtual(made.publish(TICKET)).replicas == 2
    assert sorted(calls) == [(name, f"{part}_version") for name in "ab" for part in ("commit", "prepare")]
    assert [line for line in log if line.startswith("b")] == ["b prepares", "b begins", "b serves"]


def test_the_error_of_the_only_replica_propagates(pool: Callable[..., Any]) -> None:
    error = ProofError("v5: other values")
    with pytest.raises(ProofError) as caught:
        run_virtual(pool(Replica(0, Server("a", [], error=error))).publish(TICKET))
    assert caught.value is error


def test_the_error_of_a_server_propagates_without_rays_wrapper(pool: Callable[..., Any]) -> None:
    error = RayTaskError(
        "commit_version", "a traceback", ValueError("the disk is full")
    ).as_instanceof_cause()
    with pytest.raises(ValueError, match="^the disk is full$"):
        run_virtual(pool(Replica(0, Server("a", [], error))).publish(TICKET))


def test_a_pool_needs_a_replica(pool: Callable[..., Any]) -> None:
    with pytest.raises(WeightSyncError, match="no rollout replica was started"):
        pool()


def test_every_load_gets_the_memory_services_of_all_hosts(pool: Callable[..., Any]) -> None:
    servers = [Server("here", []), Server("there", [], node="b"), Server("far", [], node="c")]
    made = pool(*(Replica(i, server) for i, server in enumerate(servers)))
    made.has_copy("logp", ["d", "b"])
    publication = run_virtual(made.publish(TICKET))
    assert publication.replicas == 3
    assert Server.memories == [
        (name, (["a", "b", "c", "d", "b"], ["a"])) for name in ("here", "there", "far")
    ]
    assert made.memories_for(TICKET) == Server.memories[0][1]


async def test_a_replica_that_restarts_on_another_node_gets_its_versions_there(
    pool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = Replica(0, Server("moving", [], node="b"))
    moving.next_node = "c"
    monkeypatch.setattr(Server, "dead", set())

    before = Services.closed
    made = pool(moving, Replica(1, Server("other", [])))
    watch = asyncio.create_task(made.watch())
    await made.publish(TICKET)
    Server.dead.add("moving")
    await asyncio.sleep(10)
    assert made.versions == {"replica 0": 5, "replica 1": 5}
    watch.cancel()
    await made.close()
    nodes = {name: memories[0] for name, memories in Server.memories}
    assert nodes["moving"] == ["b", "a"] and nodes["moving, restarted"] == ["c", "a"]
    assert Services.closed == before + 1
