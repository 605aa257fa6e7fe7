# SPDX-License-Identifier: Apache-2.0
"""What a service's failures look like to the host that asks it, and which service a host asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayTaskError

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.verl_bridge.store.object_store_transport import FromService, Route
from recipe.async_pipeline.weight_sync.hosts.shares import Bucket
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest, WeightTicket, encode, joined

pytestmark = pytest.mark.real_engine
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
