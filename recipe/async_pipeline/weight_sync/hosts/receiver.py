# SPDX-License-Identifier: Apache-2.0
"""Receive the buckets of one version into memory of this host.

Each bucket travels with a header. It is checked here, against the trainer's manifest and not against its
header; a bucket that does not match is counted and requested again. Several buckets are on their way at the
same time, and a bucket that has arrived can be sent on before the version is complete.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import msgspec

from ...core.waits.deadline import all_of
from ...core.waits.wait_queue import Broadcast
from ...errors import WeightSyncError
from ..fleet.preparation import to_the_end
from ..memory.manifest import UNREADABLE, Announcement, Manifest
from ..memory.segment import Segment, create_segment
from .shares import Bucket, landing_of
from .transport import Header, header_of

ATTEMPTS = 4
"""Number of requests for a bucket before its load fails."""
IN_FLIGHT = 4
"""Buckets of one version that are requested at the same time: some are sent while others are checked."""


class BucketVerdict(Enum):
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


Fetch = Callable[[Bucket, int], Awaitable[tuple[bytes, Any]]]
"""Maps a bucket and the number of earlier requests for it to its encoded header and its bytes."""


class Slot:
    """Memory for one version, reused by later ones."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self._allocating = threading.Lock()

    def memory(self, index: int, nbytes: int) -> Segment:
        """Return a segment with at least `nbytes` bytes. Raises WeightSyncError if memory runs out."""
        with self._allocating:
            segment = self.segments.get(index)
            if segment is None or segment.size < nbytes:
                if segment is not None:
                    segment.close()
                segment = self.segments[index] = create_segment(nbytes)
            segment.reserve(nbytes)
            return segment

    def close(self) -> None:
        """Unlink all memory."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()


class Incoming:
    """A version on its way into a slot. `accept` may run in several threads at once."""

    def __init__(self, announced: Sequence[Announcement], slot: Slot) -> None:
        """`announced` has the whole version, or the shares of all training hosts.

        Raises WeightSyncError if they contradict each other.
        """
        self._landing = landing_of(announced)
        self.version = self._landing.version
        self.verdicts: Counter[BucketVerdict] = Counter()
        self._announced, self._slot = announced, slot
        self._buckets = [
            Bucket(share, sequence)
            for share, of in enumerate(announced)
            for sequence in range(len(of.buckets))
        ]
        self._known = frozenset(self._buckets)
        self._arrived: set[Bucket] = set()
        self._copying: set[Bucket] = set()
        self._judging = threading.Lock()
        self._news = Broadcast()
        self._failure: BaseException | None = None

    def missing(self) -> list[Bucket]:
        """Return the buckets that have not arrived yet."""
        return [bucket for bucket in self._buckets if bucket not in self._arrived]

    def has(self, bucket: Bucket) -> bool:
        """Return whether a bucket has arrived and is correct."""
        return bucket in self._arrived

    def accept(self, header: bytes, payload: Any) -> BucketVerdict:
        """Check a bucket and take it in if it fits. `payload` is any buffer of bytes."""
        verdict = self._judge(header, memoryview(payload).cast("B"))
        with self._judging:
            self.verdicts[verdict] += 1
        return verdict

    def finish(self) -> Manifest:
        """Return the manifest of the local copy. Raises WeightSyncError if buckets are missing."""
        if missing := self.missing():
            raise WeightSyncError(
                f"v{self.version} cannot be used: buckets {[b.sequence for b in missing]} are missing"
            )
        return self._landing.manifest(self._slot)

    async def arrived(self, bucket: Bucket) -> None:
        """Wait until a bucket is here.

        Raises WeightSyncError if there is no such bucket or the load fails.
        """
        if bucket not in self._known:
            raise WeightSyncError(f"v{self.version} has no bucket {bucket.sequence} of share {bucket.share}")
        while bucket not in self._arrived:
            if self._failure is not None:
                raise WeightSyncError(f"v{self.version} did not arrive: {self._failure}") from self._failure
            await self._news.wait()

    def header(self, bucket: Bucket) -> bytes:
        """Return the encoded header of a bucket."""
        return header_of(self._announced[bucket.share], bucket.sequence, bucket.share)

    def payload(self, bucket: Bucket) -> Any:
        """Return the bytes of a bucket that has arrived; they may be an alias of the slot."""
        return self._landing.payload(self._slot, bucket)

    def notify(self, failure: BaseException | None = None) -> None:
        """Wake all who wait in `arrived`; with an error, they fail. Call it on the event loop."""
        self._failure = self._failure or failure
        self._news.notify()

    def _judge(self, encoded: bytes, payload: memoryview) -> BucketVerdict:
        try:
            header = msgspec.msgpack.decode(encoded, type=Header)
        except UNREADABLE:
            return BucketVerdict.CORRUPT

        if header.version != self.version:
            return BucketVerdict.STALE
        found = Bucket(header.share, header.sequence)
        if found not in self._known or header.count != len(self._announced[found.share].buckets):
            return BucketVerdict.UNKNOWN
        # Otherwise a second, corrupt copy could overwrite the first one after its checksum was compared.
        with self._judging:
            if found in self._arrived or found in self._copying:
                return BucketVerdict.REPEATED
            self._copying.add(found)
        try:
            return self._take_in(found, header.nbytes, payload)
        finally:
            self._copying.discard(found)

    def _take_in(self, found: Bucket, nbytes: int, payload: memoryview) -> BucketVerdict:
        bucket = self._announced[found.share].buckets[found.sequence]
        if not len(payload) == nbytes == bucket.nbytes:
            return BucketVerdict.TRUNCATED
        if not self._landing.take(self._slot, found, payload):
            return BucketVerdict.CORRUPT
        self._arrived.add(found)
        return BucketVerdict.ACCEPTED


async def receive(incoming: Incoming, fetch: Fetch, in_flight: int = IN_FLIGHT) -> Manifest:
    """Fetch a whole version, several buckets at a time, and return the manifest of the local copy.

    Raises WeightSyncError if a bucket failed `ATTEMPTS` times, and whatever `fetch` raises.
    """
    waiting = deque(incoming.missing())

    async def lane() -> None:
        while waiting:
            await _fetch(incoming, waiting.popleft(), fetch)

    try:
        await all_of(*(lane() for _ in range(min(in_flight, len(waiting)))))
        return await to_the_end(incoming.finish)
    except BaseException as error:
        incoming.notify(error)
        raise


async def _fetch(incoming: Incoming, bucket: Bucket, fetch: Fetch) -> None:
    verdict = None
    for attempt in range(ATTEMPTS):
        header, payload = await fetch(bucket, attempt)
        # Copy and checksum take long, so they run in a thread, which must end before its memory is reused.
        verdict = await to_the_end(partial(incoming.accept, header, payload))
        if incoming.has(bucket):
            incoming.notify()
            return
    raise WeightSyncError(
        f"bucket {bucket.sequence} of v{incoming.version} was requested {ATTEMPTS} times; the last copy was "
        f"{verdict.value if verdict else 'missing'}; see the log of the trainer's host"
    )
