# SPDX-License-Identifier: Apache-2.0
"""Shared memory: only names in the format of this package are opened."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.segment import Segment, create_segment
from recipe.async_pipeline.weight_sync.segment_names import PREFIX, SHM_DIR


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
