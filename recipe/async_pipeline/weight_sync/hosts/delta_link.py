# SPDX-License-Identifier: Apache-2.0
"""Send buckets between hosts as differences from the version that the receiving host has.

A host asks for the difference from the newest version that is complete in its memory. The sender answers
with it if it has that version too and the difference is smaller; otherwise, and whenever a bucket did not
arrive correctly, the bucket travels whole. So a difference never builds on another one, and the checksum
of the restored bucket is compared with the trainer's like that of any other. A sender whose memory of the
older version is overwritten meanwhile sends a difference that fails this comparison.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ...errors import CorruptionError, WeightSyncError
from ..memory.arena import ArenaReader
from ..memory.manifest import ITEM_BYTES, Announcement
from .delta import apply, difference
from .receiver import Fetch, Incoming
from .shares import Bucket
from .transport import Header, Transport

KEPT = 2
"""Announced versions that a training host remembers: as many as it has arenas."""


class Differences:
    """The sender's side: makes each difference once, for all hosts that ask for it."""

    def __init__(self) -> None:
        self._announced: dict[int, dict[int, Announcement]] = {}
        """What the trainer wrote on this host, by version and share."""
        self._coded: dict[tuple[int, int, Bucket], asyncio.Task[bytes | None]] = {}
        """The differences of the newest version; they take at most `delta.PAYS_BELOW` of its bytes."""

    def announced(self, share: int, announcement: Announcement) -> None:
        """Remember where the trainer's memory holds a share of a version."""
        self._announced.setdefault(announcement.version, {})[share] = announcement
        for version in sorted(self._announced)[:-KEPT]:
            del self._announced[version]

    def mapped(self, reader: ArenaReader, base: int, version: int, bucket: Bucket) -> Any | None:
        """Return a bucket of version `base` in the trainer's memory, or None if it is not there.

        `version` is the one that is sent, which may have taken its memory.
        """
        found = self._announced.get(base, {}).get(bucket.share)
        newer = self._announced.get(version, {}).get(bucket.share)
        if found is None or newer is None or bucket.sequence >= len(found.buckets):
            return None
        if found.buckets[bucket.sequence].segment == newer.buckets[bucket.sequence].segment:
            return None
        try:
            return reader.bucket(found, bucket.sequence).numpy()
        except (WeightSyncError, OSError):
            return None

    async def coded(
        self, version: int, base: int, bucket: Bucket, old: Any, whole: tuple[bytes, Any]
    ) -> tuple[bytes, Any]:
        """Return the header and the difference from `old`, or `whole` if that is no smaller."""
        header = msgspec.msgpack.decode(whole[0], type=Header)
        key = (version, base, bucket)
        if key not in self._coded:
            self._coded = {known: task for known, task in self._coded.items() if known[0] == version}
            work = asyncio.to_thread(difference, old, whole[1], self._item_bytes(version, bucket.share))
            self._coded[key] = task = asyncio.ensure_future(work)
            task.add_done_callback(partial(self._forget_failed, key))
        # Others wait for the same difference.
        delta = await asyncio.shield(self._coded[key])
        if delta is None:
            return whole
        return msgspec.msgpack.encode(msgspec.structs.replace(header, base=base)), delta

    def _forget_failed(self, key: tuple[int, int, Bucket], task: asyncio.Task[bytes | None]) -> None:
        """Have the next request make a difference again, e.g. after memory ran out."""
        if (task.cancelled() or task.exception() is not None) and self._coded.get(key) is task:
            del self._coded[key]

    def _item_bytes(self, version: int, share: int) -> int:
        """Return the size of the elements of the largest tensor; relays assume bfloat16."""
        found = self._announced.get(version, {}).get(share)
        if found is None or not found.tensors:
            return 2
        return min(8, ITEM_BYTES[max(found.tensors, key=lambda entry: entry.nbytes).dtype])


def fetch_from(transports: Sequence[Transport], newest: Incoming | None) -> Fetch:
    """Return how a host fetches buckets; with `newest`, its newest version, as differences from that."""

    async def fetch(bucket: Bucket, attempt: int) -> tuple[bytes, Any]:
        base = None
        if newest is not None and attempt == 0 and newest.has(bucket):
            base = newest.version
        header, payload = await transports[bucket.share].bucket(bucket, attempt, base)
        if base is None or newest is None or _base_of(header) != base:
            return header, payload
        return header, await asyncio.to_thread(_restored, payload, partial(newest.payload, bucket))

    return fetch


def _restored(delta: Any, base: Callable[[], Any]) -> Any:
    """Return the bucket, or no bytes if the delta is damaged, so that the bucket is requested again."""
    old = base()
    new = np.empty(len(old), np.uint8)
    try:
        apply(bytes(delta), old, new)
    except CorruptionError:
        return b""
    return new


def _base_of(header: bytes) -> int | None:
    try:
        return msgspec.msgpack.decode(header, type=Header).base
    except msgspec.MsgspecError:
        return None  # the receiver counts it as corrupt
