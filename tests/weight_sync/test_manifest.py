# SPDX-License-Identifier: Apache-2.0
"""The description of a version: what goes in comes out, and what contradicts itself does not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.manifest import (
    BucketEntry,
    Manifest,
    Sample,
    TensorEntry,
    decode,
    encode,
)


def tensor(name: str, offset: int = 0, nbytes: int = 8, bucket: int = 0) -> TensorEntry:
    return TensorEntry(name, (nbytes,), "uint8", bucket, offset, nbytes)


def manifest(*tensors: TensorEntry, sizes: tuple[int, ...] = (64, 32)) -> Manifest:
    buckets = tuple(BucketEntry(f"b{i}", size, 2**64 - 1) for i, size in enumerate(sizes))
    return Manifest(3, tensors, buckets, (Sample("a", b"\x00\xff"),), 0.25)


def test_what_is_encoded_is_decoded() -> None:
    made = manifest(tensor("a"), tensor("b", 8, 0), tensor("c", 0, 32, bucket=1))
    assert decode(encode(made)) == made
    assert made.num_bytes == 96


@pytest.mark.parametrize(
    "wrong",
    [
        tensor("x", bucket=2),
        tensor("x", bucket=-1),
        tensor("x", offset=-8),
        tensor("x", offset=60),
        tensor("x", nbytes=-8),
        tensor("x", 0, 40, bucket=1),
    ],
)
def test_a_tensor_outside_its_bucket_is_refused(wrong: TensorEntry) -> None:
    with pytest.raises(WeightSyncError, match="manifest of v3: x lies outside its bucket"):
        decode(encode(manifest(tensor("a"), wrong)))


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"nonsense", msgspec.msgpack.encode({"version": "3"}), b"\x80\x04N."]
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(WeightSyncError, match="not a weight manifest"):
        decode(data)


@settings(deadline=None, database=None, derandomize=True)
@given(data=st.binary(max_size=40))
def test_any_bytes_are_a_manifest_or_refused(data: bytes) -> None:
    with pytest.raises(WeightSyncError):
        decode(data)


@settings(deadline=None, database=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 20), max_size=12), piece_bytes=st.integers(1, 30))
def test_pieces_keep_the_order_and_the_bound(sizes: list[int], piece_bytes: int) -> None:
    tensors = tuple(tensor(f"t{i}", 0, size) for i, size in enumerate(sizes))
    pieces = list(manifest(*tensors).pieces(piece_bytes))
    assert tuple(entry for piece in pieces for entry in piece) == tensors
    for piece in pieces:
        assert piece
        assert len(piece) == 1 or sum(entry.nbytes for entry in piece) <= piece_bytes
