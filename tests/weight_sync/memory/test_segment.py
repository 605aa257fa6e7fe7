# SPDX-License-Identifier: Apache-2.0
"""Shared memory: only names in the format of this package are opened."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.memory.segment import (
    Segment,
    create_segment,
    direct_ranges,
    warn_of_pageable_copies,
)
from recipe.async_pipeline.weight_sync.memory.segment_names import PREFIX, SHM_DIR
from tests.fakes.descriptors import open_below

PAGE = mmap.PAGESIZE


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = create_segment(64)
    yield made
    made.close()


@pytest.mark.parametrize(
    "name", ["psm_foreign", "", f"../{PREFIX}x", f"{PREFIX}../../etc/passwd", "/etc/passwd"]
)
@pytest.mark.parametrize("create", [True, False])
def test_a_name_in_another_format_is_not_opened(name: str, create: bool) -> None:
    with pytest.raises(WeightSyncError, match="is not the name of a segment of this package"):
        Segment(name, 8, create=create)


def test_a_missing_segment_is_named() -> None:
    with pytest.raises(WeightSyncError, match=f"{PREFIX}gone: No such file"):
        Segment(f"{PREFIX}gone", 8, create=False)


def test_an_existing_segment_is_never_taken_over(segment: Segment) -> None:
    with pytest.raises(WeightSyncError, match="File exists"):
        Segment(segment.name, 8, create=True)


def test_too_little_shared_memory_is_an_error_and_not_a_crash() -> None:
    free = os.statvfs(SHM_DIR).f_bavail * os.statvfs(SHM_DIR).f_frsize
    large = create_segment(free * 2)
    try:
        with pytest.raises(WeightSyncError, match="MB left and the weights need more .* --shm-size"):
            large.reserve(free * 2)
    finally:
        large.close()


def test_a_reader_sees_what_the_owner_writes_and_does_not_unlink(segment: Segment) -> None:
    other = Segment(segment.name, 64, create=False)
    segment.bytes.fill_(7)
    assert other.bytes.sum() == 7 * 64
    assert other.checksum(64) == segment.checksum(64) != segment.checksum(63)
    other.close()
    assert (SHM_DIR / segment.name).exists()
    segment.close()
    assert not (SHM_DIR / segment.name).exists()


class Driver:
    """CUDA's runtime, which refuses to register memory a number of times."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.calls = refusals, list[str]()
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append("register")
        self.refusals -= 1
        self.pinned[address] = nbytes
        return 2 if self.refusals >= 0 else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        del self.pinned[address]
        return 0


def check_error(code: int) -> None:
    if code:
        raise RuntimeError(f"out of memory ({code})\nCUDA kernel errors might be reported elsewhere")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(refusals=10)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(
        "recipe.async_pipeline.weight_sync.memory.segment._clear_cuda_error",
        lambda: made.calls.append("clear"),
    )
    warn_of_pageable_copies.cache_clear()
    return made


def test_refused_pinning_warns_once_and_is_not_repeated(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    segments = [create_segment(64) for _ in range(2)]
    for segment in segments * 2:
        segment.pin([(0, 64)])
        segment.bytes[:] = 7
    assert driver.calls == ["register", "clear"] * 2, "once for each segment"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("CUDA refuses to pin shared memory (out of memory (2)): weights are copied")
    for segment in segments:
        segment.close()
    assert "unregister" not in driver.calls


def test_pinned_memory_is_unpinned_before_it_grows_and_at_the_end(driver: Driver) -> None:
    driver.refusals = 0
    segment = create_segment(4 * PAGE)
    for nbytes in (PAGE, 2 * PAGE - 1, 2 * PAGE, 4 * PAGE):
        segment.pin([(0, nbytes)])
    segment.close()
    assert driver.calls == ["register", "unregister", "register", "unregister", "register", "unregister"]
    segment.pin([(0, PAGE)])
    assert driver.calls[6:] == [], "a thread may ask for it after the end"


def test_ranges_that_share_a_page_are_pinned_as_one(driver: Driver) -> None:
    """CUDA refuses a copy that is pinned in part."""
    driver.refusals = 0
    segment = create_segment(9 * PAGE)
    segment.pin([(6 * PAGE, 6 * PAGE + 1), (0, PAGE + 1), (PAGE + 1, 2 * PAGE), (4 * PAGE, 4 * PAGE)])
    start = segment.address
    assert driver.pinned == {start: 2 * PAGE, start + 6 * PAGE: PAGE}
    segment.close()
    assert not driver.pinned


def test_only_tensors_without_gaps_are_copied_directly() -> None:
    memory = torch.arange(64, dtype=torch.int16)
    rows, columns = memory.view(8, 8)[2:4], memory.view(8, 8)[:, 2:4]
    transposed = memory[48:].view(4, 4).t()
    found = direct_ranges([rows, columns, transposed, memory[:0]])
    assert found == {memory.data_ptr(): [(32, 64), (96, 128)]}


def test_segments_keep_no_descriptor() -> None:
    """A model of 70B parameters in bfloat16 has 560 of them, in a process that may open 1,024 files."""
    create_segment(64).close()  # has opened the locks
    before = len(open_below(SHM_DIR))
    owned = [create_segment(64) for _ in range(200)]
    read = [Segment(segment.name, 64, create=False) for segment in owned]
    try:
        for segment in owned:
            segment.reserve(64)
        assert len(open_below(SHM_DIR)) == before
    finally:
        for segment in (*owned, *read):
            segment.close()
