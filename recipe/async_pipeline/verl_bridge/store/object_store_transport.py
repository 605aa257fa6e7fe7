# SPDX-License-Identifier: Apache-2.0
"""Transfer buckets between the memory services of two hosts through Ray's object store.

A bucket is put into the object store when it is requested, and freed when the other host has copied it, so
only buckets in transit take memory there. The services' processes import this module, so it imports neither
verl nor vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ray.exceptions import RayError, RayTaskError

from ...errors import WeightSyncError
from ...weight_sync.hosts.shares import Bucket
from ...weight_sync.hosts.transport import Relayed, Transport, parent_of, tree
from ...weight_sync.memory.manifest import Announcement, Failure, WeightTicket, decode_announcement


class Route(NamedTuple):
    """The hosts that get a version, as memory services know each other."""

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
