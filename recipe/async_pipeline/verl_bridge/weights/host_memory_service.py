# SPDX-License-Identifier: Apache-2.0
"""One actor on each host that owns the weight versions there; see `weight_sync/hosts/host_memory.py`.

The trainer starts a service on each node with a consumer of weights (`MemoryServices`), and hands all
consumers the same `HostMemories`, through which each asks the service of its node. The actor's process
imports neither verl nor vllm. Between two hosts, buckets travel through Ray's object store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from ...core.waits.deadline import within
from ...errors import WaitTimeout, WeightSyncError
from ...weight_sync.hosts.host_memory import HostMemory, HostStatus, VersionRequest
from ...weight_sync.hosts.host_slots import Reader
from ...weight_sync.hosts.shares import Bucket
from ...weight_sync.hosts.transport import Relayed, Transport, parent_of, tree
from ...weight_sync.memory.board import await_announcement
from ...weight_sync.memory.manifest import (
    Announcement,
    Failure,
    Manifest,
    WeightTicket,
    decode,
    decode_announcement,
    encode,
)
from ...weight_sync.memory.segment_names import sweep_orphans
from ..calls.ray_calls import got


class Route(NamedTuple):
    """The hosts that get a version, as memory services know each other.

    A bucket is put into the object store when it is requested, and freed when the other host has copied it,
    so only buckets in transit take memory there. The services' processes import this module, so it imports
    neither verl nor vllm.
    """

    services: Mapping[str, Any]
    """The handle of each host's service, by Ray node; also of training hosts."""
    receivers: tuple[str, ...]
    """The hosts with consumers, in an order on which all agree."""
    delta: bool = False
    """Whether hosts ask for differences from the version that they have."""

    def transports(self, ticket: WeightTicket, host: str, timeout_s: float) -> list[Transport]:
        """Return how `host` gets each share of a version."""
        found: list[Transport] = []
        for index, share in enumerate(ticket.shares):
            # Each share has a separate tree, so that not the same hosts send all of them.
            turn = index % max(1, len(self.receivers))
            hosts = tree(share.host, (*self.receivers[turn:], *self.receivers[:turn]))
            # A training host without consumers sends its own share and receives none.
            parent = parent_of(hosts, host) if host in hosts else None
            root = FromService(self, share, ticket, share.host, timeout_s)
            relay = parent not in (None, share.host)
            found.append(
                Relayed(root, FromService(self, share, ticket, str(parent), timeout_s) if relay else None)
            )
        return found


class FromService:
    """A `Transport` of one share from the memory service of a host."""

    def __init__(
        self, route: Route, share: WeightTicket, ticket: WeightTicket, host: str, timeout_s: float
    ) -> None:
        if host not in route.services:
            raise WeightSyncError(f"no memory service runs on host {host}; the run has {len(route.services)}")
        self._route, self._share, self._ticket = route, share, ticket
        self._host, self._timeout_s = host, timeout_s

    async def announced(self) -> Announcement:
        found = decode_announcement(await self._ask("announced", self._share, self._timeout_s))
        assert not isinstance(found, Failure), "the service raises the error of the training host"
        return found

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        (reference,) = await self._ask("lend", self._ticket, self._route, bucket, self._timeout_s, base)
        try:
            header, payload = await reference
        except RayError as error:
            raise self._lost(error) from error
        return header, payload

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the service once. Raises WeightSyncError if it fails or cannot answer."""
        try:
            return await getattr(self._route.services[self._host], method).remote(*arguments)
        except RayTaskError as error:
            raise WeightSyncError(f"host {self._host[:8]}: {error.cause}") from error
        except RayError as error:
            raise self._lost(error) from error

    def _lost(self, error: RayError) -> WeightSyncError:
        why = str(error).strip().partition("\n")[0]
        return WeightSyncError(f"the memory service of host {self._host[:8]} is gone: {why}")


RELEASE_S = 2.0
"""Deadline for the end of a lease, which holds up the next load."""
CLOSE_S = 10.0
"""Deadline for a service to unlink its memory before it ends."""


class HostMemoryService:
    """The actor. Ray restarts it if its process dies; it then receives requested versions again."""

    def __init__(self) -> None:
        # A process of this class that was killed before it unlinked its slots has left them behind.
        sweep_orphans()
        self._host: str = ray.get_runtime_context().get_node_id()
        self._memory = HostMemory(self._host)

    async def fetch(self, ticket: WeightTicket, route: Route, reader: Reader, timeout_s: float) -> bytes:
        """Return the encoded manifest of a checked version in memory of this host. See `HostMemory.fetch`."""
        return encode(await self._memory.fetch(self._request(ticket, route, timeout_s), reader))

    async def release(self, reader: Reader, version: int) -> None:
        """End the lease of a process."""
        self._memory.release(reader, version)

    # Calls of other hosts, which have another source: a service that does not answer is not asked again.

    @ray.method(max_task_retries=0)
    async def announced(self, ticket: WeightTicket, timeout_s: float) -> bytes:
        """Return what the trainer posted on this host, once it has, encoded.

        Raises WeightSyncError if `await_announcement` does.
        """
        return encode(await asyncio.to_thread(await_announcement, ticket, timeout_s))

    @ray.method(max_task_retries=0)
    async def lend(
        self, ticket: WeightTicket, route: Route, bucket: Bucket, timeout_s: float, base: int | None = None
    ) -> list[ray.ObjectRef[Any]]:
        """Return a list with a reference to the header and bytes of a bucket. See `HostMemory.lend`."""
        request = self._request(ticket, route, timeout_s)
        async with self._memory.lend(request, Bucket(*bucket), base) as lent:
            # Ray resolves a reference that is returned directly, but not one in a list.
            return [await asyncio.to_thread(ray.put, lent)]

    async def status(self) -> HostStatus:
        """Return what this host holds and did."""
        return self._memory.status()

    async def close(self) -> None:
        """Unlink all memory."""
        await self._memory.close()

    def _request(self, ticket: WeightTicket, route: Route, timeout_s: float) -> VersionRequest:
        return VersionRequest(ticket, route.transports(ticket, self._host, timeout_s), timeout_s, route.delta)


class HostMemories:
    """The memory services of a run, as its consumers see them. Travels through Ray."""

    def __init__(self, route: Route) -> None:
        self.route = route

    async def fetch(
        self, ticket: WeightTicket, reader: Reader, timeout_s: float, host: str | None = None
    ) -> Manifest:
        """Return the checked manifest of a version in memory of a host, leased to `reader` there.

        `host` is the reader's Ray node; None is the node of this process. Raises whatever `HostMemory.fetch`
        does, and WeightSyncError if the service of the host is gone.
        """
        host = host or ray.get_runtime_context().get_node_id()
        try:
            return decode(await self._service(host).fetch.remote(ticket, self.route, reader, timeout_s))
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            why = str(error).strip().partition("\n")[0]
            raise WeightSyncError(f"the memory service of host {host[:8]} is gone: {why}") from error

    async def release(self, reader: Reader, version: int, host: str | None = None) -> None:
        """End a lease on a host; see `fetch`. If the service is gone, so is the lease; if it does not
        respond, the lease ends at its deadline.
        """
        service = self._service(host or ray.get_runtime_context().get_node_id())
        with suppress(RayError, WaitTimeout):
            await within(
                service.release.remote(reader, version),
                RELEASE_S,
                owner=reader.name,
                what=f"the memory service of its host to end the lease of version {version}",
            )

    def _service(self, host: str) -> Any:
        if host not in self.route.services:
            raise WeightSyncError(f"no memory service runs on host {host[:8]}; the process has moved")
        return self.route.services[host]


class MemoryServices:
    """The trainer's side: starts a service on each node in use, and ends the services of other nodes."""

    def __init__(
        self,
        start: Callable[[str], Any] | None = None,
        end: Callable[[Any], None] | None = None,
        *,
        delta: bool = False,
    ) -> None:
        """`start` maps a Ray node to the handle of a new service there, `end` ends one and may block.

        `delta`: see `Route`.
        """
        self._delta = delta
        self._start, self._end = start or start_on, end or close_and_kill
        self._ending: list[threading.Thread] = []
        self._services: dict[str, Any] = {}

    def on(self, nodes: Sequence[str], origins: Sequence[str]) -> HostMemories:
        """Return the services for consumers on `nodes` and training hosts `origins`.

        All calls name the nodes of all consumers: a service on another node has no use and is ended, in a
        thread.
        """
        for node in (*origins, *nodes):
            if node not in self._services:
                self._services[node] = self._start(node)
        for node in self._services.keys() - {*origins, *nodes}:
            service = self._services.pop(node)
            ending = threading.Thread(target=self._end, args=(service,), name="end service", daemon=True)
            self._ending = [thread for thread in self._ending if thread.is_alive()] + [ending]
            ending.start()
        return HostMemories(Route(dict(self._services), tuple(dict.fromkeys(nodes)), self._delta))

    async def close(self) -> None:
        """Have all services unlink their memory; services of lost nodes cannot."""
        for thread in self._ending:
            await asyncio.to_thread(thread.join, CLOSE_S)
        services, self._services = list(self._services.values()), {}
        for closing in [service.close.remote() for service in services]:
            with suppress(RayError, WaitTimeout):
                await within(
                    closing, CLOSE_S, owner="the pipeline", what="a memory service to unlink its memory"
                )


def close_and_kill(service: Any) -> None:
    """Have a service unlink its memory, then end it. Blocks.

    If it does not answer in time, the next service on its host sweeps its memory.
    """
    with suppress(RayError, WaitTimeout):
        what = "a memory service to unlink its memory"
        got(service.close.remote(), CLOSE_S, owner="the pipeline", what=what)
    ray.kill(service)


def start_on(node: str) -> Any:
    """Start a service on a Ray node and return its handle."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(max_restarts=-1, max_task_retries=-1)(HostMemoryService)
    return actor.options(num_cpus=0, scheduling_strategy=strategy).remote()
