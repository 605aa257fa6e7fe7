# SPDX-License-Identifier: Apache-2.0
"""A delta restores every bit of the newer version, or is refused, or its result differs from the checksum."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.errors import CorruptionError
from recipe.async_pipeline.weight_sync.hosts import delta as module
from recipe.async_pipeline.weight_sync.hosts.delta import (
    Delta,
    Dense,
    Equal,
    Plain,
    Sparse,
    apply,
    difference,
)

ITEMS = st.sampled_from([1, 2, 4, 8])


def applied(coded: bytes, base: bytes) -> bytes:
    out = bytearray(len(base))
    apply(coded, base, out)
    return bytes(out)


def kinds(coded: bytes | None) -> list[type]:
    assert coded is not None
    return [type(chunk) for chunk in msgspec.msgpack.decode(coded, type=Delta).chunks]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)


@given(data=st.data(), length=st.integers(1, 300), item=ITEMS)
def test_any_bytes_are_restored(data: Any, length: int, item: int) -> None:
    base = data.draw(st.binary(min_size=length, max_size=length))
    target = data.draw(st.binary(min_size=length, max_size=length))
    coded = difference(base, target, item)
    if coded is not None:
        assert applied(coded, base) == target


@given(data=st.data(), length=st.integers(1, 3000), item=ITEMS)
def test_a_few_changes_are_restored_and_cost_little(data: Any, length: int, item: int) -> None:
    base = np.frombuffer(np.random.default_rng(length).bytes(length), np.uint8)
    target = base.copy()
    for at in data.draw(st.lists(st.integers(0, length - 1), max_size=5)):
        target[at] ^= data.draw(st.integers(0, 255))
    coded = difference(base, target, item)
    if coded is None:
        # The frames of zstd take more than they save in the smallest buckets.
        assert length < 400
        return
    assert applied(coded, base.tobytes()) == target.tobytes()


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.float8_e4m3fn)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@given(share=st.floats(0, 1), seed=st.integers(0, 100))
def test_tensors_of_any_kind_are_restored(dtype: torch.dtype, share: float, seed: int) -> None:
    """NaNs with different bits, infinities and signed zeros included."""
    chance = np.random.default_rng(seed)
    base = torch.from_numpy(chance.integers(-100, 100, 333)).to(dtype)
    target = torch.where(torch.from_numpy(chance.random(333) < share), base.float() * 1.01, base.float())
    if dtype.is_floating_point:
        odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
        target[:4] = odd
    target = target.to(dtype)

    old, new = (tensor.view(torch.uint8).numpy() for tensor in (base, target))
    if dtype.is_floating_point:
        old = old.copy()
        old[: dtype.itemsize] |= 1  # another NaN, perhaps
    coded = difference(old, new, dtype.itemsize)
    if coded is not None:
        assert applied(coded, old.tobytes()) == new.tobytes()


def test_each_chunk_gets_the_form_that_suits_it() -> None:
    chance = np.random.default_rng(0)
    base = chance.integers(0, 1 << 16, 128, dtype=np.uint16)
    target = base.copy()
    target[32 + 3] ^= 1  # the second chunk of 32 elements
    target[64:96] ^= 1
    target[96:] = chance.integers(0, 1 << 16, 32, dtype=np.uint16)
    target[:2] = base[:2]
    coded = difference(base, target, 2)
    assert kinds(coded) == [Equal, Sparse, Dense, Plain]
    assert coded is not None
    assert applied(coded, base.tobytes()) == target.tobytes()


@pytest.mark.parametrize(("far", "size"), [(200, 1), (2000, 2), (80_000, 4)])
def test_gaps_are_as_wide_as_the_widest(monkeypatch: pytest.MonkeyPatch, far: int, size: int) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 20)
    base, target = np.zeros(100_000, np.uint16), np.zeros(100_000, np.uint16)
    target[[5, 5 + far]] = 7
    coded = difference(base, target, 2)
    assert coded is not None and len(coded) < 200
    assert msgspec.msgpack.decode(coded, type=Delta).chunks[0].gap_bytes == size  # type: ignore[union-attr]
    assert applied(coded, base.tobytes()) == target.tobytes()


def test_buckets_that_differ_too_much_are_sent_whole() -> None:
    chance = np.random.default_rng(1)
    base, target = chance.bytes(4096), chance.bytes(4096)
    assert difference(base, target, 2) is None
    assert difference(base, base[:-2], 2) is None
    assert difference(b"", b"", 2) is None


def test_equal_buckets_cost_next_to_nothing() -> None:
    coded = difference(bytes(4096), bytes(4096), 2)
    assert set(kinds(coded)) == {Equal}
    assert coded is not None and len(coded) < 64 * 4 + 64


def test_a_delta_for_another_version_is_found_by_the_checksum() -> None:
    """Nothing in a delta says which bytes it belongs to; the trainer's checksum of the result does."""
    versions = [np.full(1000, value, np.uint16) for value in (1, 2, 3)]
    coded = difference(versions[1], versions[2], 2)
    assert coded is not None
    assert (
        xxhash.xxh3_64(applied(coded, versions[1].tobytes())).digest()
        == xxhash.xxh3_64(versions[2].tobytes()).digest()
    )
    assert applied(coded, versions[0].tobytes()) != versions[2].tobytes()


def coded_example() -> bytes:
    base = np.zeros(200, np.uint16)
    target = base.copy()
    target[[3, 40, 41, 42, 43]] = 9
    target[64:96] = 5
    coded = difference(base, target, 2)
    assert coded is not None
    return coded


@given(at=st.integers(0), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_damaged_deltas_raise_or_give_other_bytes(at: int, value: int, cut: int) -> None:
    """Never another error, and never a write outside of the bucket."""
    damaged = bytearray(coded_example())
    damaged[at % len(damaged)] = value
    out = bytearray(b"\xaa" * (400 + 16))
    view = memoryview(out)[8:-8]
    for data in (bytes(damaged), bytes(damaged[:cut]), bytes(damaged) + b"x"):
        try:
            apply(data, bytes(400), view)
        except CorruptionError:
            pass
        assert out[:8] == out[-8:] == b"\xaa" * 8


CHANGES: list[dict[str, Any]] = [
    {"nbytes": 402},
    {"nbytes": 10**15},
    {"chunk_bytes": 0},
    {"chunk_bytes": 1},
    {"item_bytes": 0},
    {"item_bytes": -2},
    {"item_bytes": 3},
    {"chunks": ()},
    {"chunks": tuple(Plain(b"x") for _ in range(7))},
    {"chunks": tuple(Dense(b"x") for _ in range(7))},
    {"chunks": tuple(Sparse(10**9, 8, b"", b"") for _ in range(7))},
    {"chunks": tuple(Sparse(0, 8, b"", b"") for _ in range(7))},
    {"chunks": tuple(Sparse(1, 3, b"", b"") for _ in range(7))},
    {"chunks": tuple(Sparse(1, 0, b"", b"") for _ in range(7))},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_what_cannot_be_a_delta_of_the_bucket_is_refused(changes: dict[str, Any]) -> None:
    described = msgspec.structs.replace(msgspec.msgpack.decode(coded_example(), type=Delta), **changes)
    with pytest.raises(CorruptionError):
        apply(msgspec.msgpack.encode(described), bytes(400), bytearray(400))


def test_the_memory_of_a_refused_delta_does_not_depend_on_its_claims() -> None:
    described = msgspec.structs.replace(
        msgspec.msgpack.decode(coded_example(), type=Delta), nbytes=10**7, chunk_bytes=1
    )
    data, bucket = msgspec.msgpack.encode(described), bytes(10**7)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="7 chunks instead of 10000000"):
            apply(data, bucket, bytearray(bucket))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(bucket)  # the bucket's copy


@pytest.mark.parametrize("gap", [40, 2**62, 2**63, 2**64 - 1])
def test_places_outside_of_the_chunk_are_refused(gap: int) -> None:
    gaps = module.packed(np.array([gap, gap], np.uint64))
    values = module.packed(np.array([1, 1], np.uint16))
    one = Delta(64, 64, 2, (Sparse(2, 8, gaps, values),))
    with pytest.raises(CorruptionError, match="outside of a chunk of 32"):
        apply(msgspec.msgpack.encode(one), bytes(64), bytearray(64))
