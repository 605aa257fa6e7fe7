# SPDX-License-Identifier: Apache-2.0
"""Versions of a few small buckets, with known bytes."""

from __future__ import annotations

import xxhash

from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader
from recipe.async_pipeline.weight_sync.memory.manifest import BucketEntry, Manifest, TensorEntry

SIZES = (64, 200, 8)


def payload(version: int, sequence: int, size: int) -> bytes:
    return bytes((version * 31 + sequence * 7 + i) % 251 for i in range(size))


def manifest(version: int, sizes: tuple[int, ...] = SIZES) -> Manifest:
    """A version whose buckets hold one tensor of bytes each."""
    return Manifest(
        version=version,
        tensors=tuple(TensorEntry(f"t{i}", (n,), "uint8", i, 0, n) for i, n in enumerate(sizes)),
        buckets=tuple(
            BucketEntry(f"elsewhere-{i}", n, xxhash.xxh3_64_intdigest(payload(version, i, n)))
            for i, n in enumerate(sizes)
        ),
        samples=(),
    )


def read(local: Manifest) -> list[bytes]:
    reader = ArenaReader()
    reader.verify(local)
    return [bytes(t.numpy()) for piece in reader.read(local, 1 << 20) for _, t in piece]


def whole(version: int, sizes: tuple[int, ...] = SIZES) -> list[bytes]:
    return [payload(version, i, n) for i, n in enumerate(sizes)]
