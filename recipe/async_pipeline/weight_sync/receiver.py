# SPDX-License-Identifier: Apache-2.0
"""Where buckets arrive that the receiver cannot map, because the trainer is on another host.

Each bucket travels with a header of its own. It is copied into shared memory of this host and checked there,
against the manifest and not against what came with it; whatever does not fit is counted and asked for again.
A version can be read once all its buckets are in, and its memory is written again only when a newer version
is
complete in the other slot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from ..errors import WeightSyncError
from .dual_buffer import DualBuffer
from .manifest import UNREADABLE, Manifest
from .segment import Segment, create_segment

ATTEMPTS = 4
"""Times that a bucket is asked for before its load fails."""


class Header(msgspec.Struct, frozen=True):
    """What travels with a bucket."""

    version: int
    sequence: int
    """Which bucket of the version, from 0."""
    count: int
    """Buckets of the version."""
    nbytes: int


class Verdict(Enum):
    """What became of a bucket that arrived."""

    ACCEPTED = "accepted"
    STALE = "stale"
    """Of another version than the one that is awaited."""
    UNKNOWN = "unknown"
    """No bucket of this version has this number, or it has another number of buckets."""
    REPEATED = "repeated"
    TRUNCATED = "truncated"
    """Not as long as it should be."""
    CORRUPT = "corrupt"
    """Its bytes are not those that the trainer wrote."""


Fetch = Callable[[int], Awaitable[tuple[bytes, Any]]]
"""Number of a bucket -> its encoded header, and its bytes as a buffer."""


class Inbox:
    """Two slots of shared memory: one that can be read, one that fills."""

    def __init__(self) -> None:
        self.verdicts: Counter[Verdict] = Counter()
        self._buffer = DualBuffer()
        self._slots: tuple[dict[int, Segment], dict[int, Segment]] = ({}, {})
        self._awaited: Manifest | None = None
        self._filling: dict[int, Segment] = {}
        self._arrived: set[int] = set()

    @property
    def version(self) -> int | None:
        """The newest version that is complete."""
        return self._buffer.ready_version

    def begin(self, manifest: Manifest) -> None:
        """Await the buckets of a version. Raises WeightSyncError: another one fills, or it is not newer."""
        self._filling = self._slots[self._buffer.begin_fill(manifest.version)]
        self._awaited, self._arrived = manifest, set()

    def missing(self) -> list[int]:
        """Numbers of the buckets that have not arrived yet."""
        awaited = self._require_awaited()
        return [i for i in range(len(awaited.buckets)) if i not in self._arrived]

    def accept(self, header: bytes, payload: Any) -> Verdict:
        """Take a bucket in, or say why not. `payload` is any buffer of bytes."""
        verdict = self._judge(header, memoryview(payload).cast("B"))
        self.verdicts[verdict] += 1
        return verdict

    def commit(self) -> Manifest:
        """The version, as it lies here. Raises WeightSyncError: buckets are missing, or nothing is
        awaited.
        """
        awaited = self._require_awaited()
        if missing := self.missing():
            raise WeightSyncError(f"v{awaited.version} cannot be used: buckets {missing} are missing")
        buckets = tuple(
            msgspec.structs.replace(bucket, segment=self._filling[i].name)
            for i, bucket in enumerate(awaited.buckets)
        )
        self._buffer.commit()
        self._awaited = None
        return msgspec.structs.replace(awaited, buckets=buckets)

    def abort(self) -> None:
        """Give up the version that is awaited; the complete one stays."""
        self._buffer.abort()
        self._awaited = None

    def close(self) -> None:
        """Unlink all memory."""
        for slot in self._slots:
            for segment in slot.values():
                segment.close()
            slot.clear()

    async def receive(self, manifest: Manifest, fetch: Fetch) -> Manifest:
        """Fetch a whole version and return it as it lies here.

        Raises WeightSyncError: a bucket could not be had in `ATTEMPTS` attempts; what `fetch` raises.
        """
        self.begin(manifest)
        try:
            for sequence in self.missing():
                await self._fetch(sequence, fetch)
            return self.commit()
        except BaseException:
            self.abort()
            raise

    async def _fetch(self, sequence: int, fetch: Fetch) -> None:
        verdict = None
        for _ in range(ATTEMPTS):
            header, payload = await fetch(sequence)
            # Copy and checksum are long; others have work to do on this loop.
            verdict = await asyncio.to_thread(self.accept, header, payload)
            if sequence not in self.missing():
                return
        version = self._require_awaited().version
        raise WeightSyncError(
            f"bucket {sequence} of v{version} was asked for {ATTEMPTS} times and came "
            f"{verdict.value if verdict else ''} "
            "the last time; see the log of the trainer's host"
        )

    def _require_awaited(self) -> Manifest:
        if self._awaited is None:
            raise WeightSyncError("no version is awaited")
        return self._awaited

    def _judge(self, encoded: bytes, payload: memoryview) -> Verdict:
        try:
            header = msgspec.msgpack.decode(encoded, type=Header)
        except UNREADABLE:
            return Verdict.CORRUPT
        awaited = self._awaited
        if awaited is None or header.version != awaited.version:
            return Verdict.STALE
        if header.count != len(awaited.buckets) or not 0 <= header.sequence < header.count:
            return Verdict.UNKNOWN
        if header.sequence in self._arrived:
            return Verdict.REPEATED
        bucket = awaited.buckets[header.sequence]
        if not len(payload) == header.nbytes == bucket.nbytes:
            return Verdict.TRUNCATED
        segment = self._memory(header.sequence, bucket.nbytes)
        segment.reserve(bucket.nbytes)
        np.copyto(segment.bytes.numpy()[: bucket.nbytes], np.frombuffer(payload, dtype=np.uint8))
        if segment.checksum(bucket.nbytes) != bucket.xxh3:
            return Verdict.CORRUPT
        self._arrived.add(header.sequence)
        return Verdict.ACCEPTED

    def _memory(self, sequence: int, nbytes: int) -> Segment:
        segment = self._filling.get(sequence)
        if segment is None or segment.size < nbytes:
            if segment is not None:
                segment.close()
            segment = self._filling[sequence] = create_segment(nbytes)
        return segment


def header_of(manifest: Manifest, sequence: int) -> bytes:
    """What travels with bucket `sequence`."""
    count, nbytes = len(manifest.buckets), manifest.buckets[sequence].nbytes
    return msgspec.msgpack.encode(Header(manifest.version, sequence, count, nbytes))
