# SPDX-License-Identifier: Apache-2.0
"""Versions through real shared memory: exact, reused, private, and gone afterwards."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync import arena
from recipe.async_pipeline.weight_sync.arena import (
    ALIGN,
    PREFIX,
    SHM_DIR,
    Arena,
    ArenaReader,
    ArenaWriter,
    Segment,
)
from recipe.async_pipeline.weight_sync.manifest import Manifest

BUCKET = 4096
Weights = dict[str, torch.Tensor]


def own_segments() -> set[str]:
    return {path.name for path in SHM_DIR.glob(f"{PREFIX}*-{os.getpid()}-*")}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = own_segments()
    yield
    assert own_segments() == before


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    made = ArenaWriter(BUCKET, proof_tensors=2, dtype=None)
    yield made
    made.close()


def weights(seed: int = 0) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    return {
        "fp32": torch.randn(7, 5, generator=draw),
        "bf16": torch.randn(3, 4, 2, generator=draw).bfloat16(),
        "ints": torch.randint(-9, 9, (11,), generator=draw),
        "scalar": torch.tensor(2.5 + seed),
        "empty": torch.empty(0, 8),
        "strided": torch.randn(6, 9, generator=draw).t(),
        "bool": torch.rand(5, generator=draw) > 0.5,
        "large": torch.randn(BUCKET, generator=draw),
        "last": torch.randn(2, generator=draw, dtype=torch.float64),
    }


def received(manifest: Manifest, piece_bytes: int = BUCKET, reader: ArenaReader | None = None) -> Weights:
    reader = reader or ArenaReader()
    reader.verify(manifest)
    return {name: tensor.clone() for piece in reader.read(manifest, piece_bytes) for name, tensor in piece}


def assert_same(found: Weights, wanted: Weights) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


# Round trips.


@pytest.mark.parametrize("piece_bytes", [1, 200, 10**9])
def test_what_is_gathered_is_received(writer: ArenaWriter, piece_bytes: int) -> None:
    manifest = writer.gather(0, weights().items())
    assert_same(received(manifest, piece_bytes), weights())
    assert manifest.version == 0
    assert manifest.gather_s > 0


def test_floating_tensors_are_cast_and_others_are_not() -> None:
    writer = ArenaWriter(BUCKET, 2, torch.bfloat16)
    try:
        found = received(writer.gather(0, weights().items()))
    finally:
        writer.close()
    cast = {name: t.bfloat16() if t.is_floating_point() else t for name, t in weights().items()}
    assert_same(found, cast)
    assert found["ints"].dtype == torch.int64


def test_a_weight_that_requires_grad_is_copied_without_its_graph(writer: ArenaWriter) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    found = received(writer.gather(0, [("p", parameter * 2)]))
    assert torch.equal(found["p"], parameter.detach() * 2)
    assert not found["p"].requires_grad


def test_tensors_are_aligned_and_a_large_one_has_a_bucket_of_its_own(writer: ArenaWriter) -> None:
    manifest = writer.gather(0, weights().items())
    assert all(entry.offset % ALIGN == 0 for entry in manifest.tensors)
    large = next(e for e in manifest.tensors if e.name == "large")
    assert large.nbytes > BUCKET
    assert [e.name for e in manifest.tensors if e.bucket == large.bucket] == ["large"]
    assert len(manifest.buckets) == 3, "before, alone, after"


def test_received_tensors_alias_the_arena(writer: ArenaWriter) -> None:
    reader = ArenaReader()
    manifest = writer.gather(0, [("a", torch.zeros(4))])
    ((_, first),) = next(reader.read(manifest, BUCKET))
    first.fill_(7)
    ((_, second),) = next(ArenaReader().read(manifest, BUCKET))
    assert torch.equal(second, torch.full((4,), 7.0)), "no copy on the way"


# Reuse.


def test_two_arenas_take_turns_and_do_not_grow(writer: ArenaWriter) -> None:
    names = []
    for version in range(6):
        manifest = writer.gather(version, weights(version).items())
        names.append(tuple(bucket.segment for bucket in manifest.buckets))
    assert not set(names[0]) & set(names[1])
    assert names[0::2] == [names[0]] * 3, "the same memory again: fresh memory is slow"
    assert names[1::2] == [names[1]] * 3
    assert own_segments() == set(names[0]) | set(names[1])


def test_a_version_outlives_the_gather_of_the_next(writer: ArenaWriter) -> None:
    first = writer.gather(0, weights(0).items())
    writer.gather(1, weights(1).items())
    assert_same(received(first), weights(0))
    writer.gather(2, weights(2).items())
    with pytest.raises(WeightSyncError, match="v0: bucket .* is corrupt"):
        ArenaReader().verify(first)


def test_one_reader_follows_all_versions(writer: ArenaWriter) -> None:
    reader = ArenaReader()
    for version in range(4):
        manifest = writer.gather(version, weights(version).items())
        assert_same(received(manifest, reader=reader), weights(version))
    assert set(reader._segments) == own_segments()


def test_a_version_may_need_more_than_the_one_before(writer: ArenaWriter) -> None:
    reader = ArenaReader()
    sizes = [10, 20, 2 * BUCKET, 3 * BUCKET, 5, 9 * BUCKET]
    for version, size in enumerate(sizes):
        wanted = {"a": torch.arange(size), "b": torch.ones(version + 1)}
        assert_same(received(writer.gather(version, wanted.items()), reader=reader), wanted)
    assert set(reader._segments) <= own_segments(), "replaced segments are let go"


def test_an_error_leaves_the_version_before_intact(writer: ArenaWriter) -> None:
    first = writer.gather(0, weights(0).items())

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "fp32", torch.zeros(3)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        writer.gather(1, breaks())
    assert_same(received(first), weights(0))
    assert_same(received(writer.gather(1, weights(1).items())), weights(1))


def test_versions_only_move_forward(writer: ArenaWriter) -> None:
    writer.gather(4, weights().items())
    with pytest.raises(WeightSyncError, match="v4 offered after v4"):
        writer.gather(4, weights().items())


# Private, and gone afterwards.


def test_segments_are_for_their_user_alone(writer: ArenaWriter) -> None:
    writer.gather(0, weights().items())
    modes = {stat.S_IMODE((SHM_DIR / name).stat().st_mode) for name in own_segments()}
    assert modes == {0o600}


def test_close_unlinks_but_what_is_mapped_stays_readable(writer: ArenaWriter) -> None:
    reader = ArenaReader()
    manifest = writer.gather(0, weights().items())
    reader.verify(manifest)
    writer.close()
    assert own_segments() == set()
    assert_same(received(manifest, reader=reader), weights())
    writer.close()


OWNER = """
import sys, torch
from recipe.async_pipeline.weight_sync.arena import ArenaWriter
manifest = ArenaWriter(4096, 1, None).gather(0, [("a", torch.ones(9000))])
print(*(b.segment for b in manifest.buckets), flush=True)
sys.stdin.read()
"""


@pytest.mark.real_engine  # another process imports torch
def test_segments_of_a_killed_owner_disappear() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    with owner:
        assert owner.stdout is not None
        names = owner.stdout.readline().split()
        assert names and all((SHM_DIR / name).exists() for name in names)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        deadline = time.monotonic() + 10
        while any((SHM_DIR / name).exists() for name in names):
            assert time.monotonic() < deadline, "the memory of a killed trainer was not returned"
            time.sleep(0.01)


# What is not trusted.


@pytest.mark.parametrize("at", [0, -1])
def test_one_wrong_byte_is_noticed(writer: ArenaWriter, at: int) -> None:
    manifest = writer.gather(0, weights().items())
    bucket = manifest.buckets[1]
    with (SHM_DIR / bucket.segment).open("r+b") as file:
        file.seek(at % bucket.nbytes)
        old = file.read(1)[0]
        file.seek(at % bucket.nbytes)
        file.write(bytes([old ^ 1]))
    with pytest.raises(WeightSyncError, match=f"v0: bucket {bucket.segment} is corrupt"):
        ArenaReader().verify(manifest)


@pytest.mark.parametrize(
    "name", ["psm_foreign", "", f"../{PREFIX}x", f"{PREFIX}../../etc/passwd", "/etc/passwd"]
)
@pytest.mark.parametrize("create", [True, False])
def test_a_name_that_is_not_ours_is_not_opened(name: str, create: bool) -> None:
    with pytest.raises(WeightSyncError, match="is not a segment of this pipeline"):
        Segment(name, 8, create=create)


def test_a_missing_segment_is_named() -> None:
    with pytest.raises(WeightSyncError, match=f"{PREFIX}gone: No such file"):
        Segment(f"{PREFIX}gone", 8, create=False)


def test_a_segment_that_was_truncated_is_refused(writer: ArenaWriter) -> None:
    manifest = writer.gather(0, weights().items())
    os.truncate(SHM_DIR / manifest.buckets[0].segment, 16)
    with pytest.raises(WeightSyncError, match="holds fewer than the"):
        ArenaReader().verify(manifest)


def test_an_existing_segment_is_never_taken_over() -> None:
    arena = Arena(64)
    arena.write("a", torch.zeros(4), None)
    try:
        (name,) = own_segments()
        with pytest.raises(WeightSyncError, match="File exists"):
            Segment(name, 8, create=True)
    finally:
        arena.close()


def test_the_samples_of_the_proof_come_from_the_arena() -> None:
    writer = ArenaWriter(BUCKET, proof_tensors=100, dtype=torch.bfloat16)
    try:
        manifest = writer.gather(0, weights().items())
    finally:
        writer.close()
    assert [s.name for s in manifest.samples] == list(weights())
    sizes = {s.name: len(s.values) for s in manifest.samples}
    assert sizes["large"] == 64 * 2, "64 values as they are served, not as they were trained"
    assert sizes["empty"] == 0


def test_too_little_shared_memory_is_an_error_and_not_a_crash(writer: ArenaWriter) -> None:
    free = os.statvfs(SHM_DIR).f_bavail * os.statvfs(SHM_DIR).f_frsize
    arena = Arena(64)
    try:
        with pytest.raises(WeightSyncError, match="MB left and the weights need more .* --shm-size"):
            arena._place(free * 2)
            arena._segments[0].reserve(free * 2)
    finally:
        arena.close()


@pytest.mark.parametrize("hash_bytes", [1, 100, 1 << 20])
def test_checksums_are_of_all_bytes_however_they_are_cut(monkeypatch: pytest.MonkeyPatch, hash_bytes: int) -> None:
    monkeypatch.setattr(arena, "HASH_BYTES", hash_bytes)
    writer = ArenaWriter(1 << 12, 2, None)
    try:
        for version in range(3):
            weights = {f"w{i}": torch.randn(7 + 90 * i) for i in range(30)}
            manifest = writer.gather(version, weights.items())
            assert len(manifest.buckets) > 1
            ArenaReader().verify(manifest)
    finally:
        writer.close()


def test_after_a_gather_that_failed_nothing_reads_its_arena_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "HASH_BYTES", 1)
    writer = ArenaWriter(1 << 12, 2, None)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(500)
        raise ValueError("the rank died")

    try:
        with pytest.raises(ValueError, match="the rank died"):
            writer.gather(0, failing())
        ArenaReader().verify(writer.gather(1, [("a", torch.zeros(500))]))
    finally:
        writer.close()
