# SPDX-License-Identifier: Apache-2.0
"""The weight versions of one host: received once and checked once, whatever number of processes map them.

On the trainer's host the versions are in the trainer's arenas, and only checked here. On any other host
they are received into two slots of shared memory. A process leases a version while it reads it; a slot
is filled again when no lease is on it and the other slot has a newer version. A lease ends when it is
released, when its process has ended, or at its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from ...core.waits.deadline import within
from ...core.waits.wait_queue import Broadcast
from ...errors import CorruptionError
from ..fleet.preparation import to_the_end
from ..memory.arena import ArenaReader
from ..memory.board import await_manifest
from ..memory.manifest import Manifest, WeightTicket
from .delta import Differences, fetch_from
from .host_slots import NUM_SLOTS, HostSlots, Reader, runs, this_process
from .receiver import BucketVerdict, Incoming, Slot, receive
from .shares import Bucket
from .transport import Mapped, Transport

READS, READ_AGAIN_S = 4, 1.0
"""Number of reads of a bucket with a wrong checksum, and the seconds in between."""
LEASE_TIMEOUTS = 4
"""A lease lasts this many times the deadline of a load. It is the last resort: a process that hangs is ended
long before, which ends its lease.
"""
LEASE_POLL_S = 0.2
"""Interval for asking whether the processes that read a version have ended: they do not notify."""
OWNER = "the memory service"


class VersionRequest(NamedTuple):
    """A version that this host is to have."""

    ticket: WeightTicket
    transports: Sequence[Transport]
    """One for each share of the version; not used for the shares of this host."""
    timeout_s: float
    delta: bool = False
    """Whether to ask for differences from the version that this host has."""


class HostStatus(NamedTuple):
    """What a host holds and did."""

    versions: list[int]
    """Complete versions in the slots, or checked versions of the trainer's arenas."""
    received: int
    """Versions received from other hosts."""
    lent: Counter[int]
    """Buckets sent to other hosts, by version."""
    verdicts: Counter[BucketVerdict]
    num_bytes: int
    """Size of all slots."""


class HostMemory:
    """The versions of host `host`, for all processes on it. Lives on one event loop."""

    def __init__(self, host: str, alive: Callable[[Reader], bool] = runs) -> None:
        self.host = host
        self._reader = ArenaReader()
        self._slots, self._memory = HostSlots(alive), [Slot() for _ in range(NUM_SLOTS)]
        self._local: dict[int, Manifest] = {}
        """Manifests of the complete versions."""
        self._incoming: dict[int, Incoming] = {}
        """The versions of the slots, complete or not."""
        self._tasks: dict[int, asyncio.Task[Manifest]] = {}
        """The work on each version, checks included; one task, however many processes wait for it."""
        self._turn = asyncio.Lock()
        self._changed = Broadcast()
        self._differences = Differences()
        self._lent: Counter[int] = Counter()
        self._received = 0
        self._verdicts: Counter[BucketVerdict] = Counter()

    def maps(self, ticket: WeightTicket) -> bool:
        """Return whether the trainer's memory, with the whole version, is on this host."""
        return ticket.host == self.host and not ticket.others

    async def fetch(self, request: VersionRequest, reader: Reader) -> Manifest:
        """Return the checked manifest of a version in memory of this host, leased to `reader`.

        Waits for: the checksums, or the version to arrive; before that, until no process reads the version
        whose slot it takes. Raises WeightSyncError if the version is no longer to be had, CorruptionError if
        it stays corrupt, and WaitTimeout naming the readers that do not finish.
        """
        version = request.ticket.version
        # From the beginning, so that the next version does not take its slot before the caller has it.
        self._slots.lease(reader, version, time.monotonic() + LEASE_TIMEOUTS * request.timeout_s)
        try:
            return await self._have(request)
        except BaseException:
            self.release(reader, version)
            raise

    def release(self, reader: Reader, version: int) -> None:
        """End the lease of a process."""
        self._slots.release(reader, version)
        self._changed.notify()

    @asynccontextmanager
    async def lend(
        self, request: VersionRequest, bucket: Bucket, base: int | None = None
    ) -> AsyncIterator[tuple[bytes, Any]]:
        """Yield the header and the bytes of a bucket, for another host; they are not reused meanwhile.

        If this host has version `base` too, and it pays, the bytes are the difference from it. A host that
        does not have the version yet begins to receive it. Waits for: the bucket. Raises WeightSyncError if
        the version is no longer to be had.
        """
        version = request.ticket.version
        self._lent[version] += 1
        shares = request.ticket.shares
        if bucket.share < len(shares) and shares[bucket.share].host == self.host:
            mapped = self._transports(request)[bucket.share]
            self._differences.announced(bucket.share, await mapped.announced())
            yield await self._coded(version, base, bucket, await mapped.bucket(bucket, 0))
            return
        reader = this_process(f"{OWNER}, which sends bucket {self._lent.total()}")
        self._slots.lease(reader, version, time.monotonic() + request.timeout_s)
        try:
            incoming = await self._begun(request)
            await incoming.arrived(bucket)
            # Joined shares have to be taken apart again.
            whole = incoming.header(bucket), await to_the_end(partial(incoming.payload, bucket))
            yield await self._coded(version, base, bucket, whole)
        finally:
            self.release(reader, version)

    def status(self) -> HostStatus:
        """Return what this host holds and did."""
        return HostStatus(
            versions=self._slots.versions or sorted(self._local),
            received=self._received,
            lent=self._lent,
            verdicts=sum((one.verdicts for one in self._incoming.values()), self._verdicts),
            num_bytes=sum(segment.size for slot in self._memory for segment in slot.segments.values()),
        )

    async def close(self) -> None:
        """Stop receiving and unlink all memory; processes that map it keep it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for slot in self._memory:
            slot.close()

    # One task for each version.

    async def _have(self, request: VersionRequest) -> Manifest:
        """Return the local manifest of a version, receiving or checking it unless that has been done."""
        version = request.ticket.version
        if version in self._local and not self.maps(request.ticket):
            return self._local[version]
        # The work continues if the first process that asked for it dies; others wait for it too.
        return await asyncio.shield(self._task(request))

    def _task(self, request: VersionRequest) -> asyncio.Task[Manifest]:
        version = request.ticket.version
        task = self._tasks.get(version)
        if task is None:
            work = self._check(request) if self.maps(request.ticket) else self._receive(request)
            task = self._tasks[version] = asyncio.create_task(self._bounded(request, work))
            task.add_done_callback(lambda done: self._ended(version, done))
        return task

    def _ended(self, version: int, task: asyncio.Task[Manifest]) -> None:
        del self._tasks[version]
        if not task.cancelled():
            # Reading it keeps asyncio from reporting an error that no process waits for any more.
            task.exception()
        self._changed.notify()

    async def _bounded(self, request: VersionRequest, work: Coroutine[Any, Any, Manifest]) -> Manifest:
        version = request.ticket.version
        return await within(
            work,
            request.timeout_s,
            owner=f"{OWNER} of host {self.host[:8]}",
            what=f"version {version}",
            holder=lambda: f"versions being read: {self._slots.in_the_way(time.monotonic()) or 'none'}",
        )

    async def _check(self, request: VersionRequest) -> Manifest:
        """Check a version of the trainer's arenas."""
        manifest = await asyncio.to_thread(await_manifest, request.ticket, request.timeout_s)
        if self._local.get(manifest.version) == manifest:
            return manifest
        await checked(lambda: self._reader.verify(manifest))
        # The trainer's arenas hold two versions.
        self._local = {v: self._local[v] for v in sorted(self._local)[-1:]} | {manifest.version: manifest}
        return manifest

    async def _receive(self, request: VersionRequest) -> Manifest:
        """Receive a version from another host into a slot."""
        transports, version = self._transports(request), request.ticket.version
        announced = await asyncio.gather(*(transport.announced() for transport in transports))
        async with self._turn:
            await self._free_slot()
            newest = self._incoming.get(max(self._slots.versions, default=-1))
            slot = self._slots.begin_fill(version, time.monotonic())
            self._forget()
            try:
                incoming = await to_the_end(partial(Incoming, announced, self._memory[slot]))
                self._incoming[version] = incoming
                self._changed.notify()
                local = await receive(incoming, fetch_from(transports, newest if request.delta else None))
            except BaseException:
                self._slots.abort()
                self._forget()
                raise
            self._slots.commit()
            self._local[version], self._received = local, self._received + 1
            return local

    async def _coded(
        self, version: int, base: int | None, bucket: Bucket, whole: tuple[bytes, Any]
    ) -> tuple[bytes, Any]:
        """Return a bucket as the difference from a version that this host has too, or whole."""
        if base is None:
            return whole
        received = self._incoming.get(base)
        if received is not None and received.has(bucket):
            old = await to_the_end(partial(received.payload, bucket))
        else:
            old = self._differences.mapped(self._reader, base, version, bucket)
        return whole if old is None else await self._differences.coded(version, base, bucket, old, whole)

    def _transports(self, request: VersionRequest) -> list[Transport]:
        """Return how this host gets each share: its own ones are in its memory."""
        return [
            Mapped(self._reader, share, request.timeout_s) if share.host == self.host else transport
            for share, transport in zip(request.ticket.shares, request.transports, strict=True)
        ]

    async def _free_slot(self) -> None:
        while self._slots.in_the_way(time.monotonic()):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LEASE_POLL_S)

    def _forget(self) -> None:
        """Drop what is known of versions that are in no slot any more."""
        kept = set(self._slots.versions)
        self._verdicts = sum(
            (one.verdicts for v, one in self._incoming.items() if v not in kept), self._verdicts
        )
        self._incoming = {v: one for v, one in self._incoming.items() if v in kept}
        self._local = {v: one for v, one in self._local.items() if v in kept}

    async def _begun(self, request: VersionRequest) -> Incoming:
        """Return a version that is here or on its way, beginning to receive it if need be."""
        version = request.ticket.version
        while version not in self._incoming:
            task, changed = self._task(request), asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if task.done() and version not in self._incoming:
                # It raises, or another version has taken the slot already.
                task.result()
        return self._incoming[version]


async def checked(verify: Callable[[], None]) -> None:
    """Check buckets in a thread, and read corrupt ones again: meanwhile the engines serve the old version.

    Raises CorruptionError if a bucket stays corrupt.
    """
    for attempt in range(1, READS + 1):
        try:
            await to_the_end(verify)
        except CorruptionError:
            if attempt == READS:
                raise
            await asyncio.sleep(READ_AGAIN_S)
        else:
            return
