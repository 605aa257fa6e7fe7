# SPDX-License-Identifier: Apache-2.0
"""Versions through real shared memory: exact, reused, private, and gone afterwards."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.memory.arena import Arena, ArenaReader, ArenaWriter, HeldBlock
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import ALIGN, Announcement, Manifest
from recipe.async_pipeline.weight_sync.memory.segment_names import PREFIX, SHM_DIR
from tests import HANG_S
from tests.fakes.descriptors import open_below
from tests.fakes.waiting import until

BUCKET = 4096
Weights = dict[str, torch.Tensor]


def own_files() -> set[str]:
    return {path.name for path in SHM_DIR.glob(f"{PREFIX}*-{os.getpid()}-*")}


def mapped_after_deletion() -> list[str]:
    """Return what this process still maps of its segments that are gone."""
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    return [line for line in maps if PREFIX in line and line.endswith("(deleted)")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = own_files()
    yield
    assert own_files() == before


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


def gathered(writer: ArenaWriter, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
    return await_manifest(writer.gather(version, weights), timeout_s=HANG_S)


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
    manifest = gathered(writer, 0, weights().items())
    assert_same(received(manifest, piece_bytes), weights())
    assert manifest.version == 0


def test_floating_tensors_are_cast_and_others_are_not() -> None:
    writer = ArenaWriter(BUCKET, 2, torch.bfloat16)
    try:
        found = received(gathered(writer, 0, weights().items()))
    finally:
        writer.close()
    cast = {name: t.bfloat16() if t.is_floating_point() else t for name, t in weights().items()}
    assert_same(found, cast)
    assert found["ints"].dtype == torch.int64


def test_a_weight_that_requires_grad_is_copied_without_its_graph(writer: ArenaWriter) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    found = received(gathered(writer, 0, [("p", parameter * 2)]))
    assert torch.equal(found["p"], parameter.detach() * 2)
    assert not found["p"].requires_grad


def test_tensors_are_aligned_and_a_large_one_has_a_separate_bucket(writer: ArenaWriter) -> None:
    manifest = gathered(writer, 0, weights().items())
    assert all(entry.offset % ALIGN == 0 for entry in manifest.tensors)
    large = next(e for e in manifest.tensors if e.name == "large")
    assert large.nbytes > BUCKET
    assert [e.name for e in manifest.tensors if e.bucket == large.bucket] == ["large"]
    assert len(manifest.buckets) == 3, "before, alone, after"


def test_received_tensors_alias_the_arena(writer: ArenaWriter) -> None:
    reader = ArenaReader()
    manifest = gathered(writer, 0, [("a", torch.zeros(4))])
    ((_, first),) = next(reader.read(manifest, BUCKET))
    first.fill_(7)
    ((_, second),) = next(ArenaReader().read(manifest, BUCKET))
    assert torch.equal(second, torch.full((4,), 7.0)), "no copy on the way"


# Reuse.


def test_a_bucket_that_grows_in_its_segment_is_mapped_again(writer: ArenaWriter) -> None:
    reader = ArenaReader()
    for version, elements in enumerate((10, 10, 100, 100, 1000, 1000)):
        values = torch.full((elements,), float(version))
        manifest = gathered(writer, version, [("a", values)])
        assert torch.equal(reader.tensors(manifest)["a"], values)


def test_the_number_of_open_files_does_not_depend_on_the_size_of_a_version(writer: ArenaWriter) -> None:
    reader, opened = ArenaReader(), []
    for version in range(4):
        values = [(f"w{i}", torch.zeros(BUCKET // 4)) for i in range(40 if version % 2 else 4)]
        manifest = gathered(writer, version, values)
        reader.verify(manifest)
        opened.append(len(open_below(SHM_DIR)))
    assert len(manifest.buckets) == 40
    assert len(set(opened)) == 1, opened


def test_two_arenas_take_turns_and_do_not_grow(writer: ArenaWriter) -> None:
    names, files = [], []
    for version in range(6):
        manifest = gathered(writer, version, weights(version).items())
        files.append(own_files())
        names.append(tuple(bucket.segment for bucket in manifest.buckets))
    assert not set(names[0]) & set(names[1])
    assert names[0::2] == [names[0]] * 3, "the same memory again: fresh memory is slow"
    assert names[1::2] == [names[1]] * 3
    assert files[1:] == [files[1]] * 5 and {*names[0], *names[1]} < files[1]


def test_a_version_outlives_the_gather_of_the_next(writer: ArenaWriter) -> None:
    first = gathered(writer, 0, weights(0).items())
    gathered(writer, 1, weights(1).items())
    assert_same(received(first), weights(0))
    gathered(writer, 2, weights(2).items())
    with pytest.raises(WeightSyncError, match="v0: bucket .* is corrupt"):
        ArenaReader().verify(first)


def test_one_reader_follows_all_versions(writer: ArenaWriter) -> None:
    reader = ArenaReader()
    for version in range(4):
        manifest = gathered(writer, version, weights(version).items())
        assert_same(received(manifest, reader=reader), weights(version))


def test_a_version_may_need_more_than_the_one_before(writer: ArenaWriter) -> None:
    before = set(mapped_after_deletion())  # by other tests, until they are collected
    reader = ArenaReader()
    sizes = [10, 20, 2 * BUCKET, 3 * BUCKET, 5, 9 * BUCKET]
    for version, size in enumerate(sizes):
        wanted = {"a": torch.arange(size), "b": torch.ones(version + 1)}
        assert_same(received(gathered(writer, version, wanted.items()), reader=reader), wanted)
    assert set(mapped_after_deletion()) <= before, "replaced segments are let go"


@pytest.mark.parametrize("every", [1, 2, 3, 8])
def test_all_tensors_are_proved_in_turn_also_if_versions_are_left_out(
    writer: ArenaWriter, every: int
) -> None:
    names, proved = set(weights()), set()
    for number in range(-(-len(names) // 2)):
        proved |= {sample.name for sample in gathered(writer, number * every, weights().items()).samples}
    assert proved == names


def test_an_error_leaves_the_version_before_intact(writer: ArenaWriter) -> None:
    first = gathered(writer, 0, weights(0).items())

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "fp32", torch.zeros(3)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        gathered(writer, 1, breaks())
    assert_same(received(first), weights(0))
    assert_same(received(gathered(writer, 1, weights(1).items())), weights(1))


def test_versions_only_move_forward(writer: ArenaWriter) -> None:
    gathered(writer, 4, weights().items())
    with pytest.raises(WeightSyncError, match="v4 offered after v4"):
        gathered(writer, 4, weights().items())


# Private, and gone afterwards.


def test_segments_are_for_their_user_alone(writer: ArenaWriter) -> None:
    gathered(writer, 0, weights().items())
    modes = {stat.S_IMODE((SHM_DIR / name).stat().st_mode) for name in own_files()}
    assert modes == {0o600}


def test_close_unlinks_but_what_is_mapped_stays_readable(writer: ArenaWriter) -> None:
    reader = ArenaReader()
    manifest = gathered(writer, 0, weights().items())
    reader.verify(manifest)
    writer.close()
    assert own_files() == set()
    assert_same(received(manifest, reader=reader), weights())
    writer.close()


OWNER = """
import sys, torch
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
ticket = ArenaWriter(4096, 1, None).gather(0, [("a", torch.ones(9000))])
print(ticket.board, *(b.segment for b in await_manifest(ticket, 600).buckets), flush=True)
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
        cwd=Path(__file__).resolve().parents[3],
    )
    with owner:
        assert owner.stdout is not None
        names = owner.stdout.readline().split()
        assert names and all((SHM_DIR / name).exists() for name in names)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        until(
            lambda: not any((SHM_DIR / name).exists() for name in names),
            "the memory of a killed trainer is returned",
        )


# What is not trusted.


@pytest.mark.parametrize("at", [0, -1])
def test_one_wrong_byte_is_noticed(writer: ArenaWriter, at: int) -> None:
    manifest = gathered(writer, 0, weights().items())
    bucket = manifest.buckets[1]
    with (SHM_DIR / bucket.segment).open("r+b") as file:
        file.seek(at % bucket.nbytes)
        old = file.read(1)[0]
        file.seek(at % bucket.nbytes)
        file.write(bytes([old ^ 1]))
    with pytest.raises(WeightSyncError, match=f"v0: bucket {bucket.segment} is corrupt"):
        ArenaReader().verify(manifest)


def test_a_segment_that_was_truncated_is_refused(writer: ArenaWriter) -> None:
    manifest = gathered(writer, 0, weights().items())
    os.truncate(SHM_DIR / manifest.buckets[0].segment, 16)
    with pytest.raises(WeightSyncError, match="has fewer than the"):
        ArenaReader().verify(manifest)


def test_the_samples_of_the_proof_come_from_the_arena() -> None:
    writer = ArenaWriter(BUCKET, proof_tensors=100, dtype=torch.bfloat16)
    try:
        manifest = gathered(writer, 0, weights().items())
    finally:
        writer.close()
    assert [s.name for s in manifest.samples] == list(weights())
    sizes = {s.name: len(s.values) for s in manifest.samples}
    assert sizes["large"] == 64 * 2, "64 values as they are served, not as they were trained"
    assert sizes["empty"] == 0


def test_every_bucket_has_its_own_checksum(writer: ArenaWriter) -> None:
    for version in range(3):
        manifest = gathered(writer, version, ((f"w{i}", torch.randn(7 + 90 * i)) for i in range(30)))
        assert len({bucket.xxh3 for bucket in manifest.buckets}) == len(manifest.buckets) > 1
        ArenaReader().verify(manifest)


# Announced during training.


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no version is announced."""
    event, describe = threading.Event(), Arena.describe

    def slowly(self: Arena, *args: Any) -> Announcement:
        assert event.wait(HANG_S)
        return describe(self, *args)

    monkeypatch.setattr(Arena, "describe", slowly)
    return event


def test_a_gather_returns_before_its_checksums_are_known(writer: ArenaWriter, go: threading.Event) -> None:
    ticket = writer.gather(0, weights(0).items())
    assert ticket.version == 0
    assert ticket.num_bytes > 4 * BUCKET
    assert ticket.gather_s > 0
    with pytest.raises(
        WeightSyncError, match="v0 was gathered, but process .* did not finish its checksums within 0 s"
    ):
        await_manifest(ticket, timeout_s=0)
    second = writer.gather(1, weights(1).items())
    go.set()
    assert_same(received(await_manifest(ticket, HANG_S)), weights(0))
    assert_same(received(await_manifest(second, HANG_S)), weights(1))


def test_an_arena_is_not_written_while_it_is_announced(writer: ArenaWriter, go: threading.Event) -> None:
    writer.gather(0, weights(0).items())
    writer.gather(1, weights(1).items())
    with ThreadPoolExecutor(1) as thread:
        third = thread.submit(writer.gather, 2, weights(2).items())
        with pytest.raises(TimeoutError):
            third.result(timeout=0.05)
        go.set()
        assert_same(received(await_manifest(third.result(), HANG_S)), weights(2))


def test_a_failure_after_the_gather_reaches_receivers_and_then_the_trainer(
    writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Arena, "describe", lambda *_: 1 / 0)
        ticket = writer.gather(0, weights(0).items())
        with pytest.raises(
            WeightSyncError,
            match="v0 was gathered, but its announcement failed: ZeroDivisionError: division by zero",
        ):
            await_manifest(ticket, HANG_S)
    assert_same(received(gathered(writer, 1, weights(1).items())), weights(1))
    with pytest.raises(ZeroDivisionError):
        writer.gather(2, weights(2).items())


def test_a_ticket_of_an_arena_that_is_used_again_says_so(writer: ArenaWriter) -> None:
    first = writer.gather(0, weights(0).items())
    for version in (1, 2):
        gathered(writer, version, weights(version).items())
    with pytest.raises(WeightSyncError, match="v0 is no longer in memory; v2 took its place"):
        await_manifest(first, HANG_S)


# Several ranks write one arena.


class Threads:
    """Ranks that are threads."""

    def __init__(self, count: int) -> None:
        self.meet = threading.Barrier(count, timeout=HANG_S)
        self.shared: Any = None

    def of(self, rank: int) -> Any:
        outer = self

        class Rank:
            hosts = 1

            def __init__(self) -> None:
                self.rank = rank

            def share(self, value: Any) -> Any:
                if rank == 0:
                    outer.shared = value
                outer.meet.wait()
                found = outer.shared
                outer.meet.wait()
                return found

            def barrier(self) -> None:
                outer.meet.wait()

        return Rank()


def rows_of(whole: Weights, rank: int, count: int) -> list[HeldBlock]:
    """Rows in chunks, as FSDP2 cuts them: the last ranks may have fewer, or none. Scalars are rank 0's."""
    parts = []
    for name, tensor in whole.items():
        if tensor.dim() == 0:
            parts.append(HeldBlock(name, (), tensor.dtype, (), tensor if rank == 0 else None))
            continue
        height = -(-tensor.shape[0] // count)
        first = min(rank * height, tensor.shape[0])
        block = tensor[first : first + height]
        parts.append(
            HeldBlock(name, tuple(tensor.shape), tensor.dtype, (first, *[0] * (tensor.dim() - 1)), block)
        )
    return parts


def columns_of(whole: Weights, rank: int, count: int) -> list[HeldBlock]:
    parts = []
    for name, tensor in whole.items():
        if tensor.dim() < 2:
            parts += rows_of({name: tensor}, rank, count)
            continue
        width = -(-tensor.shape[1] // count)
        first = min(rank * width, tensor.shape[1])
        offset = (0, first, *[0] * (tensor.dim() - 2))
        parts.append(
            HeldBlock(name, tuple(tensor.shape), tensor.dtype, offset, tensor[:, first : first + width])
        )
    return parts


def interleaved_rows_of(whole: Weights, rank: int, count: int) -> list[HeldBlock]:
    """Rows that lie between others in memory, one by one: a view with one dimension more than the block."""
    parts = []
    for part in rows_of(whole, rank, count):
        if part.values is not None and part.values.dim():
            between = torch.stack([part.values, torch.full_like(part.values, 7)], dim=1)
            part = part._replace(values=between[:, :1], block=tuple(part.values.shape))
        parts.append(part)
    return parts


@pytest.mark.parametrize("cut", [rows_of, columns_of, interleaved_rows_of])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_ranks_hold_in_parts_is_received_whole(cut: Any, count: int, dtype: torch.dtype | None) -> None:
    ranks = Threads(count)
    writers = [ArenaWriter(BUCKET, 3, dtype, ranks.of(rank)) for rank in range(count)]
    try:
        with ThreadPoolExecutor(count) as threads:
            # The last two have tensors that the first three had not.
            for version in range(5):
                whole = weights(version) | ({"more": torch.randn(3 * BUCKET)} if version > 2 else {})
                calls = [
                    threads.submit(writer.gather_parts, version, cut(whole, rank, count))
                    for rank, writer in enumerate(writers)
                ]
                tickets = [call.result(timeout=HANG_S) for call in calls]
                assert tickets[1:] == [None] * (count - 1)
                cast = {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in whole.items()}
                assert tickets[0] is not None
                assert_same(received(await_manifest(tickets[0], HANG_S)), cast)
    finally:
        for writer in writers:
            writer.close()


def test_whole_tensors_and_parts_may_follow_each_other(writer: ArenaWriter) -> None:
    for version in range(6):
        if version % 3:
            ticket = writer.gather_parts(version, rows_of(weights(version), 0, 1))
        else:
            ticket = writer.gather(version, weights(version).items())
        assert ticket is not None
        assert_same(received(await_manifest(ticket, HANG_S)), weights(version))
