# SPDX-License-Identifier: Apache-2.0
"""The description of a version: what goes in comes out, and what contradicts itself does not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.memory.manifest import (
    ALIGN,
    BucketEntry,
    Failure,
    Layout,
    Manifest,
    Sample,
    TensorEntry,
    WeightTicket,
    decode,
    decode_announcement,
    decode_ticket,
    encode,
    over_nodes,
)


def tensor(name: str, offset: int = 0, nbytes: int = 8, bucket: int = 0) -> TensorEntry:
    return TensorEntry(name, (nbytes,), "uint8", bucket, offset, nbytes)


def manifest(*tensors: TensorEntry, sizes: tuple[int, ...] = (64, 32)) -> Manifest:
    buckets = tuple(BucketEntry(f"b{i}", size, 2**64 - 1) for i, size in enumerate(sizes))
    samples = tuple(Sample(entry.name, bytes(min(entry.nbytes, 64))) for entry in tensors[:1])
    return Manifest(3, tensors, buckets, samples)


def test_what_is_encoded_is_decoded() -> None:
    made = manifest(tensor("a"), tensor("b", 8, 0), tensor("c", 0, 32, bucket=1))
    assert decode(encode(made)) == made
    assert made.num_bytes == 96


def test_each_node_of_a_consumer_gets_its_own_segments() -> None:
    first = manifest(tensor("a"))
    second = msgspec.structs.replace(
        first,
        buckets=tuple(msgspec.structs.replace(one, segment=f"far-{one.segment}") for one in first.buckets),
    )
    made = decode(encode(over_nodes([first, second])))
    assert (made.on_node(0), made.on_node(1)) == (first, second)
    assert over_nodes([first]) is first is first.on_node(0)
    with pytest.raises(WeightSyncError, match="v3 is in the memory of 2 nodes .* a rank is on node 2"):
        made.on_node(2)


def test_nodes_with_different_versions_are_refused() -> None:
    first, other = manifest(tensor("a")), manifest(tensor("b"))
    with pytest.raises(WeightSyncError, match="v3 differs between node 0 and node 1"):
        over_nodes([first, other])
    wrong = msgspec.structs.replace(first, elsewhere=(first.buckets[:1],))
    with pytest.raises(WeightSyncError, match="its buckets differ between nodes"):
        decode(encode(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        tensor("x", bucket=2),
        tensor("x", bucket=-1),
        tensor("x", offset=-8),
        tensor("x", offset=60),
        tensor("x", 0, 40, bucket=1),
    ],
)
def test_a_tensor_outside_its_bucket_is_refused(wrong: TensorEntry) -> None:
    with pytest.raises(WeightSyncError, match="manifest of v3: x is outside its bucket"):
        decode(encode(manifest(tensor("a"), wrong)))


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"nonsense", msgspec.msgpack.encode({"version": "3"}), b"\x80\x04N."]
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(WeightSyncError, match="not a weight manifest"):
        decode(data)


def with_entry(**changes: Any) -> Manifest:
    return manifest(tensor("a"), msgspec.structs.replace(tensor("x"), **changes))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (with_entry(nbytes=-8), "x cannot have -8 bytes"),
        (with_entry(shape=(9,)), r"x cannot have 8 bytes as uint8 \[9\]"),
        (with_entry(dtype="load"), "x cannot have 8 bytes as load"),
        (with_entry(dtype="float32"), "x cannot have 8 bytes as float32"),
        (with_entry(shape=(-2, -4)), "not a weight manifest"),
        (with_entry(name="a"), "two of its tensors have the same name"),
        (manifest(tensor("a"), sizes=(-1,)), "not a weight manifest"),
        (msgspec.structs.replace(manifest(tensor("a")), version=-1), "not a weight manifest"),
        (
            msgspec.structs.replace(manifest(tensor("a")), samples=(Sample("b", b""),)),
            "the sample of b does not fit its tensor",
        ),
        (
            msgspec.structs.replace(manifest(tensor("a")), samples=(Sample("a", b"123"),)),
            "the sample of a does not fit its tensor",
        ),
        (msgspec.structs.replace(manifest(), adapter="nonsense"), "not described by a JSON object"),
        (msgspec.structs.replace(manifest(), adapter="[" * 100_000), "not described by a JSON object"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(wrong: Manifest, why: str) -> None:
    with pytest.raises(WeightSyncError, match=why):
        decode(encode(wrong))


# What comes from elsewhere: our message, or our error.


class Boom:
    """Unpickling this would be noticed."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was unpickled",))


DECODERS = (decode, decode_ticket, decode_announcement)
HOSTILE = settings(deadline=None, database=None, derandomize=True, max_examples=80)


@pytest.mark.parametrize("parse", DECODERS)
def test_a_pickle_is_not_unpickled(parse: Callable[[bytes], Any]) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(WeightSyncError, match="not a "):
            parse(pickle.dumps(Boom(), protocol))


@pytest.mark.parametrize("parse", DECODERS)
def test_a_message_that_is_too_large_is_not_even_parsed(
    parse: Callable[[bytes], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipe.async_pipeline.weight_sync.memory.manifest.MAX_BYTES", 16)
    with pytest.raises(WeightSyncError, match="17 bytes, the limit is 16"):
        parse(bytes(17))


def survives(data: bytes) -> None:
    for parse in DECODERS:
        try:
            found = parse(data)
        except WeightSyncError:
            continue
        assert isinstance(found, Manifest | WeightTicket | Failure)


@HOSTILE
@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    survives(data)


@HOSTILE
@given(data=st.data())
def test_a_true_message_that_was_cut_or_changed_on_its_way(data: st.DataObject) -> None:
    messages: list[Manifest | WeightTicket | Failure] = [
        manifest(tensor("a"), tensor("b", 8)),
        WeightTicket(3, "b", 7, 96, 0.25),
        Failure("x"),
    ]
    whole = encode(data.draw(st.sampled_from(messages)))
    survives(whole[: data.draw(st.integers(0, len(whole)))])
    changed = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        changed[at] = data.draw(st.integers(0, 255))
    survives(bytes(changed))


NUMBERS = st.one_of(st.integers(-3, 70), st.integers(-(2**63), 2**64 - 1))
WORDS = st.one_of(st.sampled_from(["a", "b", "uint8", "float32", "load", "../x"]), st.text(max_size=8))
ENTRIES = st.builds(
    TensorEntry, WORDS, st.lists(NUMBERS, max_size=4).map(tuple), WORDS, NUMBERS, NUMBERS, NUMBERS
)
MANIFESTS = st.builds(
    Manifest,
    NUMBERS,
    st.lists(ENTRIES, max_size=3).map(tuple),
    st.lists(st.builds(BucketEntry, WORDS, NUMBERS, NUMBERS), max_size=3).map(tuple),
    st.lists(st.builds(Sample, WORDS, st.binary(max_size=9)), max_size=2).map(tuple),
    st.one_of(st.none(), WORDS, st.just("{}")),
)


@pytest.mark.slow
@HOSTILE
@given(made=st.one_of(MANIFESTS, st.builds(WeightTicket, NUMBERS, WORDS, NUMBERS, NUMBERS, st.floats())))
def test_a_message_of_the_right_form_with_any_content(made: Manifest | WeightTicket) -> None:
    survives(encode(made))


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
    with pytest.raises(WeightSyncError, match="x is outside its bucket"):
        decode_announcement(encode(manifest(tensor("x", bucket=9))))
    with pytest.raises(WeightSyncError, match="not a weight manifest"):
        decode(encode(Failure("the device is gone")))


def test_a_ticket_is_no_manifest_and_the_other_way_round() -> None:
    ticket = WeightTicket(version=3, board="b", pid=7, num_bytes=96, gather_s=0.25)
    assert decode_ticket(encode(ticket)) == ticket
    with pytest.raises(WeightSyncError, match="not a weight manifest"):
        decode(encode(ticket))
    with pytest.raises(WeightSyncError, match="not a ticket of a weight version"):
        decode_ticket(encode(manifest()))


@settings(deadline=None, database=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 300), max_size=20), bucket_bytes=st.integers(1, 400))
def test_a_layout_keeps_the_order_wastes_no_bucket_and_overlaps_nothing(
    sizes: list[int], bucket_bytes: int
) -> None:
    layout = Layout(bucket_bytes)
    placed = [layout.place(f"t{i}", (size,), "uint8", 1) for i, size in enumerate(sizes)]
    assert layout.tensors == placed
    assert [entry.nbytes for entry in placed] == sizes
    for before, after in zip(placed, placed[1:], strict=False):
        if after.bucket == before.bucket:
            assert after.offset >= before.offset + before.nbytes
        else:
            assert after.bucket == before.bucket + 1
            assert -(-(before.offset + before.nbytes) // ALIGN) * ALIGN + after.nbytes > bucket_bytes, (
                "it would have fitted"
            )
    for bucket, used in enumerate(layout.used):
        inside = [entry for entry in placed if entry.bucket == bucket]
        assert used == max(entry.offset + entry.nbytes for entry in inside)
        assert used <= bucket_bytes or len(inside) == 1
        assert all(entry.offset % ALIGN == 0 for entry in inside)
