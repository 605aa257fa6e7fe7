# SPDX-License-Identifier: Apache-2.0
"""The difference between two versions of a bucket, without loss and for any bytes.

A step at a small learning rate changes few bfloat16 values, and those in their last bits. So the exclusive
or of two versions is almost zero. It is coded chunk by chunk, by elements of the tensors' size:

    equal    nothing changed
    sparse   the gaps between the changed elements, then their values
    dense    all elements
    plain    the new bytes themselves, if the other forms are no smaller

Gaps, values and elements are split into planes (all first bytes, then all second bytes, and so on), which
zstd compresses better: high bytes are equal to each other.

A delta applies to the version that it was made from and to no other. The receiver must compare
the checksum of the result with the trainer's: a delta holds none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import CorruptionError, WeightSyncError
from ..memory.arena import ArenaReader
from ..memory.manifest import ITEM_BYTES, UNREADABLE, Announcement
from ..memory.memory_work import THREADS
from .receiver import Fetch, Incoming
from .shares import Bucket
from .transport import Header, Transport

CHUNK_BYTES = 4 << 20
"""Small enough for a core's cache, and enough chunks of a bucket for several threads."""
PAYS_BELOW = 0.75
"""Send a bucket as a delta if it has at most this share of the bytes; otherwise the copy costs more time than
the link saves."""
SPARSE_BELOW = 0.4
"""Share of changed elements up to which their positions cost less than the zeros between them."""
LEVEL = 1
"""Higher levels of zstd are several times slower and save nothing here."""

Words = np.ndarray[Any, np.dtype[Any]]
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BYTES = {np.dtype(word): size for size, word in _WORDS.items()}
_UNREADABLE = (*UNREADABLE, pa.ArrowException, OSError, ValueError, IndexError)


class Sparse(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """Changed elements of a chunk."""

    changed: int
    """How many there are."""
    gap_bytes: int
    """Size of a gap: the number of unchanged elements before a changed one."""
    gaps: bytes
    values: bytes


class Dense(msgspec.Struct, frozen=True, tag="d", array_like=True):
    """All elements of a chunk, by exclusive or."""

    values: bytes


class Plain(msgspec.Struct, frozen=True, tag="p", array_like=True):
    """The new bytes of a chunk."""

    values: bytes


class Equal(msgspec.Struct, frozen=True, tag="e", array_like=True):
    """A chunk without changes."""


class Delta(msgspec.Struct, frozen=True):
    """The difference between two versions of a bucket."""

    nbytes: int
    chunk_bytes: int
    item_bytes: int
    """Bytes of an element; a chunk that is no multiple of them is coded byte by byte."""
    chunks: tuple[Sparse | Dense | Plain | Equal, ...]


def difference(base: Any, target: Any, item_bytes: int) -> bytes | None:
    """Return what turns `base` into `target`, or None if sending `target` is cheaper.

    Both are buffers of bytes; buffers of different lengths have no difference. `item_bytes` is the size of
    most elements, 1, 2, 4 or 8. The result does not depend on it, its size does.
    """
    old, new = _as_bytes(base), _as_bytes(target)
    if len(old) != len(new) or not len(new):
        return None
    with ThreadPoolExecutor(THREADS, thread_name_prefix="delta") as threads:
        places = _chunks(len(new), CHUNK_BYTES)
        coded = list(threads.map(lambda at: _coded(old[at], new[at], item_bytes), places))
    size = sum(_size(chunk) for chunk in coded)
    if size > PAYS_BELOW * len(new):
        return None
    return msgspec.msgpack.encode(Delta(len(new), CHUNK_BYTES, item_bytes, tuple(coded)))


def apply(delta: bytes, base: Any, out: Any) -> None:
    """Write the version that `delta` makes of `base` into `out`, a writable buffer of the same length.

    Raises CorruptionError if the delta cannot be one of this bucket; `out` is then undefined. A delta of
    another version gives wrong bytes without an error: compare checksums.
    """
    old, new = _as_bytes(base), _as_bytes(out)
    try:
        described = msgspec.msgpack.decode(delta, type=Delta)
        if not described.nbytes == len(old) == len(new):
            raise CorruptionError(
                f"a delta of {described.nbytes} bytes does not fit a bucket of {len(old)} bytes"
            )
        if described.item_bytes not in _WORDS:
            raise CorruptionError(f"a delta has elements of {described.item_bytes} bytes")
        if described.chunk_bytes < 1:
            raise CorruptionError(f"a delta has chunks of {described.chunk_bytes} bytes")
        if (chunks := -(-described.nbytes // described.chunk_bytes)) != len(described.chunks):
            raise CorruptionError(f"a delta has {len(described.chunks)} chunks instead of {chunks}")
        places = _chunks(described.nbytes, described.chunk_bytes)
        write = partial(_write, described.item_bytes)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="delta") as threads:
            done = threads.map(lambda at, chunk: write(chunk, old[at], new[at]), places, described.chunks)
            for _ in done:
                pass
    except _UNREADABLE as error:
        raise CorruptionError(f"a delta cannot be read: {' '.join(str(error).split())}") from error


def _as_bytes(buffer: Any) -> Words:
    return np.frombuffer(buffer, dtype=np.uint8)


def _chunks(nbytes: int, chunk_bytes: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk_bytes, nbytes)) for start in range(0, nbytes, chunk_bytes))


def _word(nbytes: int, item_bytes: int) -> Any:
    """Return the type of the elements of a chunk."""
    return _WORDS[item_bytes if nbytes % item_bytes == 0 else 1]


def _coded(old: Words, new: Words, item_bytes: int) -> Sparse | Dense | Plain | Equal:
    word = _word(len(new), item_bytes)
    changes = np.bitwise_xor(old.view(word), new.view(word))
    changed = changes != 0
    count = int(np.count_nonzero(changed))
    if count == 0:
        return Equal()
    if count <= SPARSE_BELOW * len(changes):
        places = np.flatnonzero(changed)
        gaps = np.diff(places, prepend=-1) - 1
        narrow = gaps.astype(np.min_scalar_type(int(gaps.max())))
        coded: Sparse | Dense = Sparse(count, _BYTES[narrow.dtype], packed(narrow), packed(changes[places]))
    else:
        coded = Dense(packed(changes))
    return coded if _size(coded) < len(new) else Plain(new.tobytes())


def _write(item_bytes: int, chunk: Sparse | Dense | Plain | Equal, old: Words, new: Words) -> None:
    if isinstance(chunk, Plain):
        if len(chunk.values) != len(new):
            raise CorruptionError(f"a chunk of {len(new)} bytes has {len(chunk.values)}")
        np.copyto(new, np.frombuffer(chunk.values, np.uint8))
        return

    word = _word(len(new), item_bytes)
    if isinstance(chunk, Dense):
        changes = _unpacked(chunk.values, len(new) // np.dtype(word).itemsize, word)
        np.bitwise_xor(old.view(word), changes, out=new.view(word))
        return

    np.copyto(new, old)
    if isinstance(chunk, Sparse):
        elements = new.view(word)
        if not 0 < chunk.changed <= len(elements):
            raise CorruptionError(f"{chunk.changed} of {len(elements)} elements cannot have changed")
        if chunk.gap_bytes not in _WORDS:
            raise CorruptionError(f"a chunk has gaps of {chunk.gap_bytes} bytes")
        gaps = _unpacked(chunk.gaps, chunk.changed, _WORDS[chunk.gap_bytes])
        # As signed numbers, so that a sum that overflows is out of range instead of wrapping around.
        places = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if gaps.astype(np.float64).sum() + chunk.changed > len(elements):
            raise CorruptionError(f"a changed element is outside of a chunk of {len(elements)}")
        elements[places] ^= _unpacked(chunk.values, chunk.changed, word)


def _size(chunk: Sparse | Dense | Plain | Equal) -> int:
    if isinstance(chunk, Equal):
        return 0
    return len(chunk.values) + (len(chunk.gaps) if isinstance(chunk, Sparse) else 0)


def packed(words: Words) -> bytes:
    """Return words as a chunk has them: byte planes, compressed."""
    planes = np.ascontiguousarray(words.view(np.uint8).reshape(len(words), -1).T)
    return bytes(_codec().compress(pa.py_buffer(planes), asbytes=True))


def _unpacked(data: bytes, count: int, word: Any) -> Words:
    size = np.dtype(word).itemsize
    # The size is what it must be, not what the data claims.
    planes = np.frombuffer(_codec().decompress(data, decompressed_size=count * size), np.uint8)
    return np.ascontiguousarray(planes.reshape(size, count).T).reshape(-1).view(word)


def _codec() -> Any:
    """Return a codec; one of pyarrow's must not be used by two threads at once."""
    return pa.Codec("zstd", LEVEL)


KEPT = 2
"""Announced versions that a training host remembers: as many as it has arenas."""


class Differences:
    """The sender's side: makes each difference once, for all hosts that ask for it.

    Send buckets between hosts as differences from the version that the receiving host has.

    A host asks for the difference from the newest version that is complete in its memory. The sender answers
    with it if it has that version too and the difference is smaller; otherwise, and whenever a bucket did not
    arrive correctly, the bucket travels whole. So a difference never builds on another one, and the checksum
    of the restored bucket is compared with the trainer's like that of any other. A sender whose memory of the
    older version is overwritten meanwhile sends a difference that fails this comparison.
    """

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
