# SPDX-License-Identifier: Apache-2.0
"""What one weight version consists of. Travels as typed msgpack, never as a pickle."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..errors import WeightSyncError


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


class Manifest(msgspec.Struct, frozen=True):
    """A complete version: everything a receiver needs to map, check, load and prove it."""

    version: int
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]
    samples: tuple[Sample, ...]
    gather_s: float

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


def encode(manifest: Manifest) -> bytes:
    """Manifest as bytes."""
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Manifest out of bytes. Raises WeightSyncError: not a manifest, or it contradicts itself."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise WeightSyncError(f"not a weight manifest: {error}") from error
    for entry in manifest.tensors:
        in_range = 0 <= entry.bucket < len(manifest.buckets)
        if not in_range or min(entry.offset, entry.nbytes) < 0 or entry.offset + entry.nbytes > manifest.buckets[entry.bucket].nbytes:
            raise WeightSyncError(f"manifest of v{manifest.version}: {entry.name} lies outside its bucket")
    return manifest
