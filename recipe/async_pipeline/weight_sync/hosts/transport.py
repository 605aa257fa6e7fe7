# SPDX-License-Identifier: Apache-2.0
"""How a host gets the buckets of a version: from one other host, or down a tree of hosts.

A new way to carry buckets is one more `Transport`. `verl_bridge/weights/host_memory_service.py` has the one
through Ray's object store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from ...core.waits.deadline import within
from ...errors import WaitTimeout, WeightSyncError
from ..memory.arena import ArenaReader
from ..memory.board import await_announcement
from ..memory.manifest import Announcement, WeightTicket
from .shares import Bucket

logger = logging.getLogger(__name__)

RELAY_ATTEMPTS = 2
"""Requests for a bucket that go to the parent; later ones, after broken copies, go to the root."""
RELAY_S = 60.0
"""Deadline for a bucket from the parent, which may itself have to wait for the bucket."""


class Header(msgspec.Struct, frozen=True):
    """The header of a bucket."""

    version: int
    sequence: int
    """Index of the bucket in its share of the version, from 0."""
    count: int
    """Number of buckets of the share."""
    nbytes: int
    """Bytes of the bucket, also if fewer travel."""
    share: int = 0
    base: int | None = None
    """Set if the bytes that travel are the difference from this version; see `delta.py`."""


def header_of(announced: Announcement, sequence: int, share: int = 0) -> bytes:
    """Return the encoded header of bucket `sequence`."""
    count, nbytes = len(announced.buckets), announced.buckets[sequence].nbytes
    return msgspec.msgpack.encode(Header(announced.version, sequence, count, nbytes, share))


class Transport(Protocol):
    """Brings one share of a version to this host: all of it, if the training ranks are on one host."""

    async def announced(self) -> Announcement:
        """Return what the trainer announced, once it has. Raises WeightSyncError if it never will."""

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        """Return a bucket's encoded header and its bytes, as a buffer; neither has been checked.

        The bytes may be the difference from version `base`, if the header says so. `attempt` counts the
        requests for this bucket from 0. Raises WeightSyncError if the other host is lost or no longer has
        the version.
        """


class Relayed:
    """A `Transport` that gets buckets from the parent in a tree, and from its root if the parent fails."""

    def __init__(self, root: Transport, parent: Transport | None, deadline_s: float = RELAY_S) -> None:
        """`parent` is None for a host directly below the root."""
        self._root, self._parent, self._deadline_s = root, parent, deadline_s

    async def announced(self) -> Announcement:
        """Ask the root: a manifest is small, and a host must not check buckets against a relay's word."""
        return await self._root.announced()

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        parent = self._parent
        if parent is None or attempt >= RELAY_ATTEMPTS:
            return await self._root.bucket(bucket, attempt, base)
        try:
            return await within(
                parent.bucket(bucket, attempt, base),
                self._deadline_s,
                owner="the memory service",
                what=f"bucket {bucket.sequence} from a relay",
            )
        except (WeightSyncError, WaitTimeout) as error:
            if self._parent is not None:
                logger.warning("a relay failed, so the rest comes from the trainer's host. %s", error)
            self._parent = None
            return await self._root.bucket(bucket, attempt, base)


class Mapped:
    """A `Transport` within the training host itself."""

    def __init__(self, reader: ArenaReader, ticket: WeightTicket, timeout_s: float) -> None:
        self._reader, self._ticket, self._timeout_s = reader, ticket, timeout_s

    async def announced(self) -> Announcement:
        return await asyncio.to_thread(await_announcement, self._ticket, self._timeout_s)

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        """Return the header and bytes, an alias of the arena; never a difference."""
        found = await self.announced()
        if not 0 <= bucket.sequence < len(found.buckets):
            raise WeightSyncError(f"v{found.version} has no bucket {bucket.sequence} of share {bucket.share}")
        payload = self._reader.bucket(found, bucket.sequence).numpy()
        return header_of(found, bucket.sequence, bucket.share), payload


FAN_OUT = 2
"""Hosts that one host sends to."""


def tree(origin: str, receivers: Sequence[str]) -> tuple[str, ...]:
    """Return all hosts of a tree in order, its root first. A host that occurs twice counts once."""
    return tuple(dict.fromkeys((origin, *receivers)))


def parent_of(hosts: Sequence[str], host: str, fan_out: int = FAN_OUT) -> str | None:
    """Return the host from which `host` gets a version, or None for the root, `hosts[0]`.

    Raises WeightSyncError if `host` is not in the list.
    """
    if host not in hosts:
        raise WeightSyncError(f"host {host} is not among the {len(hosts)} hosts of this version")
    index = hosts.index(host)
    return None if index == 0 else hosts[(index - 1) // fan_out]
