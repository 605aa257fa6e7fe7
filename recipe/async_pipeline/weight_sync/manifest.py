# SPDX-License-Identifier: Apache-2.0
"""What one weight version consists of. Travels as typed msgpack, never as a pickle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from ..errors import WeightSyncError

ALIGN = 64
"""Each tensor starts on a cache line, which suits every dtype."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor inside a bucket; offsets and sizes in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    nbytes: int


class BucketEntry(msgspec.Struct, frozen=True):
    """One shared-memory segment and the checksum of its first `nbytes` bytes."""

    segment: str
    nbytes: int
    xxh3: int


class Sample(msgspec.Struct, frozen=True):
    """Values of one tensor at positions that version and name determine; see `delivery`."""

    name: str
    values: bytes


class Ticket(msgspec.Struct, frozen=True):
    """A version that was gathered; its manifest follows on a board in the shared memory of the trainer's host."""

    version: int
    board: str
    pid: int
    """Process that will post it."""
    num_bytes: int
    gather_s: float


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Posted instead of a manifest."""

    reason: str


class Manifest(msgspec.Struct, frozen=True, tag=True):
    """A complete version: everything a receiver needs to map, check, load and prove it."""

    version: int
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]
    samples: tuple[Sample, ...]
    adapter: str | None = None
    """The tensors are a LoRA adapter, described by this JSON in the words of peft; the base never changes."""

    @property
    def num_bytes(self) -> int:
        return sum(b.nbytes for b in self.buckets)

    def pieces(self, piece_bytes: int) -> Iterator[tuple[TensorEntry, ...]]:
        """The tensors in order, in runs of at most `piece_bytes` (a larger tensor stands alone)."""
        run: list[TensorEntry] = []
        size = 0
        for entry in self.tensors:
            if run and size + entry.nbytes > piece_bytes:
                yield tuple(run)
                run, size = [], 0
            run.append(entry)
            size += entry.nbytes
        if run:
            yield tuple(run)


class Layout:
    """Where the tensors of a version go: in order, into buckets, each on a cache line. The same on all ranks."""

    def __init__(self, bucket_bytes: int) -> None:
        self.tensors: list[TensorEntry] = []
        self.used: list[int] = []
        """Bytes of each bucket."""
        self._bucket_bytes = bucket_bytes

    def place(self, name: str, shape: tuple[int, ...], dtype: str, itemsize: int) -> TensorEntry:
        """Add a tensor. One that is larger than a bucket gets a bucket of its own."""
        nbytes = math.prod(shape) * itemsize
        offset = -(-self.used[-1] // ALIGN) * ALIGN if self.used else 0
        if not self.used or offset + nbytes > self._bucket_bytes:
            self.used.append(0)
            offset = 0
        self.used[-1] = offset + nbytes
        entry = TensorEntry(name, shape, dtype, len(self.used) - 1, offset, nbytes)
        self.tensors.append(entry)
        return entry


def encode(message: Manifest | Ticket | Failure) -> bytes:
    """As typed msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Manifest:
    """Manifest out of bytes. Raises WeightSyncError: not a manifest, or it contradicts itself."""
    return _checked(_decoded(data, Manifest, "weight manifest"))


def decode_ticket(data: bytes) -> Ticket:
    """Raises WeightSyncError: not a ticket."""
    ticket: Ticket = _decoded(data, Ticket, "ticket of a weight version")
    return ticket


def decode_announcement(data: bytes) -> Manifest | Failure:
    """What a board says. Raises WeightSyncError: neither of the two, or it contradicts itself."""
    found: Manifest | Failure = _decoded(data, Manifest | Failure, "weight manifest")
    return found if isinstance(found, Failure) else _checked(found)


def _decoded(data: bytes, kind: Any, what: str) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise WeightSyncError(f"not a {what}: {error}") from error


def _checked(manifest: Manifest) -> Manifest:
    for entry in manifest.tensors:
        in_range = 0 <= entry.bucket < len(manifest.buckets)
        if not in_range or min(entry.offset, entry.nbytes) < 0 or entry.offset + entry.nbytes > manifest.buckets[entry.bucket].nbytes:
            raise WeightSyncError(f"manifest of v{manifest.version}: {entry.name} lies outside its bucket")
    return manifest
