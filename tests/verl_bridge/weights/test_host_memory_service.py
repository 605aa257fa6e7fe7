# SPDX-License-Identifier: Apache-2.0
"""Versions reach every node of a Ray cluster once; services start, end and are replaced; with real nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray
import torch
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayTaskError,
)

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.verl_bridge.weights import host_memory_service
from recipe.async_pipeline.verl_bridge.weights.host_memory_service import (
    CLOSE_S,
    FromService,
    HostMemories,
    MemoryServices,
    Route,
    close_and_kill,
)
from recipe.async_pipeline.weight_sync.hosts.host_memory import HostStatus
from recipe.async_pipeline.weight_sync.hosts.host_slots import this_process
from recipe.async_pipeline.weight_sync.hosts.receiver import BucketVerdict
from recipe.async_pipeline.weight_sync.hosts.shares import Bucket
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest, WeightTicket, encode, joined
from tests import HANG_S
from tests.fakes.ray_nodes import add_node, start_cluster
from tests.fakes.waiting import until

pytestmark = pytest.mark.real_engine
BUCKET_BYTES = 1 << 20
WEIGHTS = {
    f"layer.{i}.weight": torch.randn(300, 300, generator=torch.Generator().manual_seed(i)) for i in range(9)
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """Yield Ray's ids of the trainer's node and of three others, each with an object store."""
    cluster = start_cluster(num_cpus=1)
    others = [add_node(cluster, num_cpus=1) for _ in range(3)]
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield [cluster.head_node.node_id, *(node.node_id for node in others)]
    finally:
        ray.shutdown()
        cluster.shutdown()


class Consumer:
    """The receiving half of a process that computes with published weights."""

    async def load(self, ticket: WeightTicket, memories: HostMemories) -> tuple[dict[str, float], list[str]]:
        """Return the sums of all tensors, and the names of the segments that hold them."""
        local = await memories.fetch(ticket, this_process("a consumer"), HANG_S)
        sums = {name: float(t.double().sum()) for name, t in ArenaReader().tensors(local).items()}
        await memories.release(this_process("a consumer"), ticket.version)
        return sums, [bucket.segment for bucket in local.buckets]


def consumer_on(node: str) -> Any:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Consumer).options(num_cpus=0, scheduling_strategy=strategy).remote()


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    made = ArenaWriter(BUCKET_BYTES, 4, None)
    yield made
    made.close()


@pytest.fixture
def services() -> Iterator[MemoryServices]:
    made = MemoryServices()
    yield made
    asyncio.run(made.close())


def gathered(writer: ArenaWriter, version: int, host: str) -> tuple[WeightTicket, dict[str, float]]:
    weights = {name: tensor + version for name, tensor in WEIGHTS.items()}
    ticket = msgspec.structs.replace(writer.gather(version, weights.items()), host=host)
    return ticket, {name: float(t.double().sum()) for name, t in weights.items()}


def statuses(memories: HostMemories) -> dict[str, HostStatus]:
    found = {node: service.status.remote() for node, service in memories.route.services.items()}
    return {node: ray.get(status, timeout=HANG_S) for node, status in found.items()}


@pytest.mark.nightly
def test_every_host_receives_each_version_once_and_the_trainers_host_sends_it_twice(
    nodes: list[str], writer: ArenaWriter, services: MemoryServices
) -> None:
    consumers = {node: [consumer_on(node) for _ in range(2)] for node in nodes}
    for version in range(3):
        ticket, expected = gathered(writer, version, nodes[0])
        memories = services.on(nodes, [ticket.host])
        loads = {n: [one.load.remote(ticket, memories) for one in group] for n, group in consumers.items()}
        found = {node: ray.get(load, timeout=HANG_S) for node, load in loads.items()}
        assert all(sums == expected for of_node in found.values() for sums, _ in of_node)
        assert all(first == second for first, second in found.values()), "both map the same memory"

    buckets = len(found[nodes[0]][0][1])
    assert buckets > 2
    for node, status in statuses(memories).items():
        assert status.received == (0 if node == nodes[0] else 3)
        assert status.versions == [1, 2]
        assert (
            status.lent == dict.fromkeys(range(3), {nodes[0]: 2 * buckets, nodes[1]: buckets}.get(node, 0))
            or node in nodes[2:]
            and not status.lent
        )
        if node != nodes[0]:
            assert status.verdicts == {BucketVerdict.ACCEPTED: 3 * buckets}
            assert status.num_bytes <= 1.1 * 2 * ticket.num_bytes


@pytest.mark.nightly
def test_a_service_whose_process_dies_is_replaced_and_receives_again(
    nodes: list[str], writer: ArenaWriter, services: MemoryServices
) -> None:
    ticket, expected = gathered(writer, 0, nodes[0])
    memories = services.on(nodes[1:2], [ticket.host])
    consumer, service = consumer_on(nodes[1]), memories.route.services[nodes[1]]
    before = ray.get(consumer.load.remote(ticket, memories), timeout=HANG_S)
    os.kill(ray.get(service.__ray_call__.remote(lambda actor: os.getpid()), timeout=HANG_S), signal.SIGKILL)
    after = ray.get(consumer.load.remote(ticket, memories), timeout=HANG_S)
    assert before[0] == after[0] == expected
    assert not set(before[1]) & set(after[1])
    assert statuses(memories)[nodes[1]].received == 1


@pytest.mark.nightly
def test_a_relay_that_is_lost_is_replaced_by_the_trainers_host(
    nodes: list[str], writer: ArenaWriter, services: MemoryServices
) -> None:
    ticket, expected = gathered(writer, 0, nodes[0])
    memories = services.on(nodes[1:], [ticket.host])
    ray.get([service.status.remote() for service in memories.route.services.values()], timeout=HANG_S)
    # As with a lost node: it does not restart.
    ray.kill(memories.route.services[nodes[1]])
    sums, segments = ray.get(consumer_on(nodes[3]).load.remote(ticket, memories), timeout=HANG_S)
    assert sums == expected
    trainers = ray.get(memories.route.services[nodes[0]].status.remote(), timeout=HANG_S)
    assert trainers.lent == {0: len(segments)}
    with pytest.raises(WeightSyncError, match="the memory service of host .* is gone"):
        ray.get(consumer_on(nodes[1]).load.remote(ticket, memories), timeout=HANG_S)


class Counting:
    """Stands for services."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[Any] = []

    def services(self) -> MemoryServices:
        def start(node: str) -> str:
            self.started.append(node)
            return f"service {len(self.started)} on {node}"

        return MemoryServices(start, self.ended.append)

    def has_ended(self, *services: Any) -> None:
        """Wait until these services, and no others, have ended."""
        until(lambda: len(self.ended) >= len(services), "ended")
        assert self.ended == list(services)


@pytest.fixture
def counting() -> Counting:
    return Counting()


def test_one_service_runs_on_each_host_in_use(counting: Counting) -> None:
    services = counting.services()
    memories = services.on(["b", "a", "b", "c"], ["a"])
    assert memories.route.receivers == ("b", "a", "c") and sorted(counting.started) == ["a", "b", "c"]
    again = services.on(["b", "c"], ["a"])
    assert again.route.services == memories.route.services and counting.ended == []


def test_the_service_of_a_host_that_is_no_longer_used_is_ended(counting: Counting) -> None:
    services = counting.services()
    first = services.on(["b", "c"], ["a"])
    services.on(["b"], ["a"])
    counting.has_ended(first.route.services["c"])
    again = services.on(["b", "c"], ["a"])
    assert again.route.services["c"] != first.route.services["c"], (
        "a replica that returns there gets a new one"
    )


class Closable:
    """Stands for a service that closes at once."""

    def __init__(self) -> None:
        self.close = self

    def remote(self) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Closing:
    """Stands for a service and for the end of one: notes what is done to it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.log = error, []  # type: ignore[var-annotated]
        self.close = self

    def remote(self) -> str:
        self.log.append("close")
        return "closing"

    def get(self, reference: str, *, timeout: float) -> None:
        assert reference == "closing"
        self.log.append(timeout)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, GetTimeoutError(), ActorDiedError()])
def test_a_service_unlinks_its_memory_before_it_is_killed(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Closing(error)
    monkeypatch.setattr(ray, "get", service.get)
    monkeypatch.setattr(ray, "kill", lambda killed: service.log.append(killed))
    close_and_kill(service)
    assert service.log == ["close", CLOSE_S, service]


async def test_a_run_ends_after_the_services_that_it_ends(counting: Counting) -> None:
    released = threading.Event()

    def end(service: Any) -> None:
        released.wait()
        counting.ended.append(service)

    services = MemoryServices(lambda node: Closable(), end)
    services.on(["b"], ["a"])
    services.on(["a"], ["a"])
    assert counting.ended == [], "the caller is not held up"

    asyncio.get_running_loop().call_soon(released.set)
    await services.close()
    assert len(counting.ended) == 1


async def test_a_service_that_does_not_respond_holds_up_no_consumer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory_service, "RELEASE_S", 0.01)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    hung = SimpleNamespace(release=SimpleNamespace(remote=lambda *lease: never))
    await HostMemories(Route({"a": hung}, ())).release(this_process("a consumer"), 3, "a")
    assert never.cancelled()


async def test_a_host_without_a_service_is_named() -> None:
    memories = HostMemories(Route({}, ()))
    with pytest.raises(WeightSyncError, match="no memory service runs on host a; the process has moved"):
        await memories.release(this_process("a consumer"), 3, "a")


@pytest.mark.nightly
def test_a_process_that_has_moved_to_another_host_says_so(
    nodes: list[str], services: MemoryServices, writer: ArenaWriter
) -> None:
    ticket, _ = gathered(writer, 0, nodes[0])
    memories = services.on(nodes[:1], [ticket.host])
    with pytest.raises(WeightSyncError, match="no memory service runs on host"):
        ray.get(consumer_on(nodes[1]).load.remote(ticket, memories), timeout=HANG_S)


TICKET = WeightTicket(version=3, board="b", pid=1, num_bytes=8, gather_s=0.0, host="a" * 20)
MANIFEST = Manifest(version=3, tensors=(), buckets=(), samples=())
BUCKET = Bucket(0, 2)


async def value(found: Any) -> Any:
    if isinstance(found, Exception):
        raise found
    return found


class Service:
    """Stands for a service's handle; records its callers."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.announced = SimpleNamespace(remote=lambda *arguments: self._call(answer, *arguments))
        self.lend = self.announced

    def _call(self, answer: Callable[[], Any], *arguments: Any) -> Any:
        self.calls.append(arguments)
        return value(answer())


def transport_from(answer: Callable[[], Any]) -> FromService:
    return FromService(
        Route({TICKET.host: Service(answer)}, (TICKET.host,)), TICKET, TICKET, TICKET.host, 5.0
    )


def test_a_manifest_and_a_bucket_arrive() -> None:
    assert asyncio.run(transport_from(lambda: encode(MANIFEST)).announced()) == MANIFEST
    came = asyncio.run(transport_from(lambda: [value((b"header", b"data"))]).bucket(BUCKET, 0))
    assert came == (b"header", b"data")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RayTaskError("lend", "a traceback", WeightSyncError("v3 is no longer in memory")),
            r"^host aaaaaaaa: v3 is no longer in memory$",
        ),
        (ActorDiedError(), r"^the memory service of host aaaaaaaa is gone: "),
        (ActorUnavailableError("no answer", None), r"^the memory service of host aaaaaaaa is gone: "),
    ],
)
def test_a_service_that_fails_is_one_error_of_one_line(error: Exception, message: str) -> None:
    for fetched in (
        transport_from(lambda: error).announced(),
        transport_from(lambda: error).bucket(BUCKET, 0),
    ):
        with pytest.raises(WeightSyncError, match=message) as caught:
            asyncio.run(fetched)
        assert "\n" not in str(caught.value)


def test_a_bucket_that_is_lost_with_its_service_is_the_same_error() -> None:
    lost = ObjectLostError("ab" * 28, None, "")
    with pytest.raises(WeightSyncError, match=r"the memory service of host aaaaaaaa is gone"):
        asyncio.run(transport_from(lambda: [value(lost)]).bucket(BUCKET, 0))


def test_a_host_asks_its_parent_and_the_root_announces() -> None:
    hosts = [TICKET.host, *"bcdef"]
    for host in hosts[1:]:
        services = {name: Service(lambda: [value((b"", b""))]) for name in hosts}
        route = Route(services, tuple("bcdef"))
        (transport,) = route.transports(TICKET, host, 5.0)
        asyncio.run(transport.bucket(BUCKET, 0))
        (asked,) = [name for name, service in services.items() if service.calls]
        assert asked == {"b": TICKET.host, "c": TICKET.host, "d": "b", "e": "b", "f": "c"}[host]
        assert services[asked].calls == [(TICKET, route, BUCKET, 5.0, None)]


def test_the_shares_of_several_training_hosts_have_different_relays() -> None:
    shares = [msgspec.structs.replace(TICKET, host=host) for host in ("x", "y")]
    hosts, asked = ["x", "y", *"bcd"], []
    services = {name: Service(lambda: [value((b"", b""))]) for name in hosts}
    route, whole = Route(services, tuple("bcd")), joined(shares)
    for index, transport in enumerate(route.transports(whole, "d", 5.0)):
        asyncio.run(transport.bucket(Bucket(index, 0), 0))
        asked.append([name for name, service in services.items() if service.calls])
        for service in services.values():
            service.calls.clear()
    assert asked == [["b"], ["y"]]


def test_a_training_host_without_consumers_asks_no_relay() -> None:
    services = {name: Service(lambda: [value((b"", b""))]) for name in (TICKET.host, "b")}
    (transport,) = Route(services, ("b",)).transports(TICKET, TICKET.host, 5.0)
    asyncio.run(transport.bucket(BUCKET, 0))
    assert len(services[TICKET.host].calls) == 1


def test_a_host_without_a_service_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="no memory service runs on host aaaaaaaa"):
        Route({"b": None}, ("b",)).transports(TICKET, "b", 5.0)
