# SPDX-License-Identifier: Apache-2.0
"""Copies and checksums by several threads equal those by one."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.weight_sync.memory import memory_work
from recipe.async_pipeline.weight_sync.memory.memory_work import apart, checksum, copy_all, copy_in_background
from tests import HANG_S


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory_work, "PIECE_BYTES", 64)
    monkeypatch.setattr(memory_work, "HASHED_BYTES", 100)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_checksum_is_of_the_pieces_of_fixed_size() -> None:
    data = bytes(range(256))
    assert checksum(data[:100]) == xxhash.xxh3_64_intdigest(data[:100])
    pieces = [data[:100], data[100:200], data[200:]]
    joined = b"".join(map(xxhash.xxh3_64_digest, pieces))
    assert checksum(bytearray(data)) == xxhash.xxh3_64_intdigest(joined)
    assert checksum(b"") == xxhash.xxh3_64_intdigest(b"")


@given(st.integers(0, 350), st.integers(0, 349))
def test_each_byte_counts(size: int, at: int) -> None:
    data = bytearray(size)
    before = checksum(data)
    if at < size:
        data[at] ^= 1
        assert checksum(data) != before


SHAPES = [(), (0,), (1,), (3,), (7, 5), (300,), (40, 3, 2), (1, 400), (0, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_all_sizes_are_copied_and_cast(dtype: torch.dtype) -> None:
    sources = [torch.randn(shape) for shape in SHAPES]
    targets = [torch.full(shape, -1.0, dtype=dtype) for shape in SHAPES]
    copy_all(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(dtype))


def test_views_and_broadcasts_are_copied_as_by_copy_() -> None:
    whole, source = torch.zeros(50, 8), torch.randn(8, 50)
    row = torch.randn(1, 8)
    copy_all([whole[:, 2:5], whole[:, 5:]], [source.T[:, 2:5], row[:, 5:]])
    assert torch.equal(whole[:, 2:5], source.T[:, 2:5])
    assert torch.equal(whole[:, 5:], row[:, 5:].expand(50, 3))
    assert not whole[:, :2].any()


def test_conjugated_and_negated_views_are_copied_as_values() -> None:
    values = torch.randn(20, 4, dtype=torch.complex64)
    targets = [torch.zeros(20, 4, dtype=torch.complex64), torch.zeros(20, 4)]
    copy_all(targets, [values.conj(), values.conj().imag])
    assert torch.equal(targets[0], values.conj().resolve_conj())
    assert torch.equal(targets[1], -values.imag)


def test_large_blocks_of_the_same_type_are_not_copied_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch: list[int] = []
    plain = torch._foreach_copy_

    def counted(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        by_torch.append(len(targets))
        plain(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    whole = torch.zeros(300, 2)
    copy_all([whole[:299], whole[299:, :1]], [torch.ones(299, 2), torch.ones(1, 1, dtype=torch.bfloat16)])
    assert sum(by_torch) == 1, "the cast alone"
    assert whole.sum() == 599


def test_a_copy_in_the_background_gives_way_in_its_own_thread_only() -> None:
    target, found = torch.zeros(300, 2), list[int]()
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def copy() -> None:
        copy_in_background([target], [torch.ones(300, 2)])
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    copy_in_background([target[:1]], [torch.full((1, 2), 2.0)])
    assert found == [min(19, own + memory_work.BACKGROUND_NICE)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    assert target.sum() == 602


def test_nothing_is_copied_if_there_is_nothing() -> None:
    copy_all([], [])


def test_parameters_can_be_targets() -> None:
    parameter = torch.nn.Parameter(torch.zeros(100, 4))
    copy_all([parameter.data], [torch.ones(100, 4)])
    assert bool((parameter == 1).all())


def test_an_error_is_raised_after_all_work_has_ended() -> None:
    targets = [torch.zeros(2), torch.zeros(300)]
    with pytest.raises(RuntimeError, match="size"):
        copy_all(targets, [torch.zeros(3), torch.ones(300)])


def test_targets_are_apart_unless_one_begins_within_another() -> None:
    memory = torch.zeros(10, 4)
    assert apart([memory[5:], memory[:5], memory[3:3]])
    assert not apart([memory[:6], memory[5:]])
    assert not apart([memory[:, :2], memory[:, 2:]]), "interleaved rows are not told from overlapping ones"
    assert apart([])


def _hash(data: bytes, found: multiprocessing.SimpleQueue[int]) -> None:
    found.put(checksum(data))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_has_its_own_threads() -> None:
    data = bytes(1000)
    wanted = checksum(data)
    context = multiprocessing.get_context("fork")
    found: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    child = context.Process(target=_hash, args=(data, found))
    child.start()
    child.join(HANG_S)
    if child.is_alive():
        child.kill()
        pytest.fail("the child waits for threads that only its parent has")
    assert found.get() == wanted
