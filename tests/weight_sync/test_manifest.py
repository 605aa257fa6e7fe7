# SPDX-License-Identifier: Apache-2.0
"""The description of a version: what goes in comes out, and what contradicts itself does not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.manifest import (
    ALIGN,
    BucketEntry,
    Failure,
    Layout,
    Manifest,
    Sample,
    TensorEntry,
    Ticket,
    decode,
    decode_announcement,
    decode_ticket,
    encode,
)


def tensor(name: str, offset: int = 0, nbytes: int = 8, bucket: int = 0) -> TensorEntry:
    return TensorEntry(name, (nbytes,), "uint8", bucket, offset, nbytes)


def manifest(*tensors: TensorEntry, sizes: tuple[int, ...] = (64, 32)) -> Manifest:
    buckets = tuple(BucketEntry(f"b{i}", size, 2**64 - 1) for i, size in enumerate(sizes))
    return Manifest(3, tensors, buckets, (Sample("a", b"\x00\xff"),))


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


def test_a_board_says_a_manifest_or_a_failure() -> None:
    for said in (manifest(tensor("a")), Failure("the device is gone")):
        assert decode_announcement(encode(said)) == said
    with pytest.raises(WeightSyncError, match="x lies outside its bucket"):
        decode_announcement(encode(manifest(tensor("x", bucket=9))))
    with pytest.raises(WeightSyncError, match="not a weight manifest"):
        decode(encode(Failure("the device is gone")))


def test_a_ticket_is_no_manifest_and_the_other_way_round() -> None:
    ticket = Ticket(version=3, board="b", pid=7, num_bytes=96, gather_s=0.25)
    assert decode_ticket(encode(ticket)) == ticket
    with pytest.raises(WeightSyncError, match="not a weight manifest"):
        decode(encode(ticket))
    with pytest.raises(WeightSyncError, match="not a ticket of a weight version"):
        decode_ticket(encode(manifest()))


@settings(deadline=None, database=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 300), max_size=20), bucket_bytes=st.integers(1, 400))
def test_a_layout_keeps_the_order_wastes_no_bucket_and_overlaps_nothing(sizes: list[int], bucket_bytes: int) -> None:
    layout = Layout(bucket_bytes)
    placed = [layout.place(f"t{i}", (size,), "uint8", 1) for i, size in enumerate(sizes)]
    assert layout.tensors == placed
    assert [entry.nbytes for entry in placed] == sizes
    for before, after in zip(placed, placed[1:], strict=False):
        if after.bucket == before.bucket:
            assert after.offset >= before.offset + before.nbytes
        else:
            assert after.bucket == before.bucket + 1
            assert -(-(before.offset + before.nbytes) // ALIGN) * ALIGN + after.nbytes > bucket_bytes, "it would have fitted"
    for bucket, used in enumerate(layout.used):
        inside = [entry for entry in placed if entry.bucket == bucket]
        assert used == max(entry.offset + entry.nbytes for entry in inside)
        assert used <= bucket_bytes or len(inside) == 1
        assert all(entry.offset % ALIGN == 0 for entry in inside)
