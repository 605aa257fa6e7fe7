# SPDX-License-Identifier: Apache-2.0
"""Receive buckets from another host, whose memory cannot be mapped.

Each bucket travels with a header. It is copied into shared memory of this host and checked there, against
the manifest and not against its header; a bucket that does not match is counted and requested again. A
version can be read once all its buckets have arrived. Its memory is reused only after a newer version is
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
"""Number of requests for a bucket before its load fails."""


class Header(msgspec.Struct, frozen=True):
    """The header of a bucket."""

    version: int
    sequence: int
    """Index of the bucket in its version, from 0."""
    count: int
    """Number of buckets of the version."""
    nbytes: int


class Verdict(Enum):
    """The result of checking a bucket that arrived."""

    ACCEPTED = "accepted"
    STALE = "stale"
    """It belongs to another version than the awaited one."""
    UNKNOWN = "unknown"
    """The version has no bucket with this index, or another number of buckets."""
    REPEATED = "repeated"
    TRUNCATED = "truncated"
    """Its length is wrong."""
    CORRUPT = "corrupt"
    """Its bytes differ from the trainer's."""


Fetch = Callable[[int], Awaitable[tuple[bytes, Any]]]
"""Maps a bucket's index to its encoded header and its bytes, as a buffer."""


class Inbox:
    """Two slots of shared memory: one readable, one being filled."""

    def __init__(self) -> None:
        self.verdicts: Counter[Verdict] = Counter()
        self._buffer = DualBuffer()
        self._slots: tuple[dict[int, Segment], dict[int, Segment]] = ({}, {})
        self._awaited: Manifest | None = None
        self._filling: dict[int, Segment] = {}
        self._arrived: set[int] = set()

    @property
    def version(self) -> int | None:
        """Return the newest complete version, or None."""
        return self._buffer.ready_version

    def begin(self, manifest: Manifest) -> None:
        """Await the buckets of a version. Raises WeightSyncError if another one fills or it is not newer."""
        self._filling = self._slots[self._buffer.begin_fill(manifest.version)]
        self._awaited, self._arrived = manifest, set()

    def missing(self) -> list[int]:
        """Return the indices of the buckets that have not arrived yet."""
        awaited = self._require_awaited()
        return [i for i in range(len(awaited.buckets)) if i not in self._arrived]

    def accept(self, header: bytes, payload: Any) -> Verdict:
        """Check a bucket and take it in if it fits. `payload` is any buffer of bytes."""
        verdict = self._judge(header, memoryview(payload).cast("B"))
        self.verdicts[verdict] += 1
        return verdict

    def commit(self) -> Manifest:
        """Return the manifest of the local copy. Raises WeightSyncError if buckets are missing."""
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
        """Abandon the awaited version; the complete one stays."""
        self._buffer.abort()
        self._awaited = None

    def close(self) -> None:
        """Unlink all memory."""
        for slot in self._slots:
            for segment in slot.values():
                segment.close()
            slot.clear()

    async def receive(self, manifest: Manifest, fetch: Fetch) -> Manifest:
        """Fetch a whole version and return the manifest of the local copy.

        Raises WeightSyncError if a bucket failed `ATTEMPTS` times, and whatever `fetch` raises.
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
            # Copy and checksum take long; do not block the event loop.
            verdict = await asyncio.to_thread(self.accept, header, payload)
            if sequence not in self.missing():
                return
        version = self._require_awaited().version
        raise WeightSyncError(
            f"bucket {sequence} of v{version} was requested {ATTEMPTS} times; the last copy was "
            f"{verdict.value if verdict else 'missing'}; "
            "see the log of the trainer's host"
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
    """Return the encoded header of bucket `sequence`."""
    count, nbytes = len(manifest.buckets), manifest.buckets[sequence].nbytes
    return msgspec.msgpack.encode(Header(manifest.version, sequence, count, nbytes))
