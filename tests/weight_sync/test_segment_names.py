# SPDX-License-Identifier: Apache-2.0
"""Segments whose owner is gone are swept; segments of live processes are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync import segment_names
from recipe.async_pipeline.weight_sync.segment_names import PREFIX, SHM_DIR, new_name, open_own, sweep_orphans


def test_names_are_random_and_in_this_format() -> None:
    first, second = new_name(), new_name()
    assert first != second
    assert first.startswith(PREFIX)


def test_only_segments_of_dead_processes_are_swept() -> None:
    code = (
        "from recipe.async_pipeline.weight_sync.segment_names import SHM_DIR, new_name\n"
        "name = new_name(); (SHM_DIR / name).touch(); print(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    dead, alive = SHM_DIR / done.stdout.strip(), SHM_DIR / new_name()
    alive.touch()
    try:
        assert dead.exists()
        assert dead.name in sweep_orphans()
        assert not dead.exists()
        assert alive.exists()
    finally:
        alive.unlink()


@pytest.fixture
def orphan() -> Iterator[Path]:
    """A segment of a process that does not exist."""
    path = SHM_DIR / new_name().replace(f"-{os.getpid()}-", "-0-")
    path.touch(mode=0o600)
    yield path
    path.unlink(missing_ok=True)


def test_a_segment_that_another_process_sweeps_first_is_no_error(
    orphan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = orphan.with_name(f"{orphan.name}x")
    listed = SimpleNamespace(glob=lambda pattern: [gone, orphan])
    monkeypatch.setattr(segment_names, "SHM_DIR", listed)
    assert sweep_orphans() == [orphan.name]
    assert not orphan.exists()


def test_orphans_of_another_user_are_not_swept(orphan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: orphan.stat().st_uid + 1)
    assert orphan.name not in sweep_orphans()
    assert orphan.exists()


# Whose memory it is.


@pytest.fixture
def made() -> Iterator[Path]:
    path = SHM_DIR / new_name()
    path.touch(mode=0o600)
    yield path
    path.unlink()


def test_what_this_user_made_for_itself_can_be_opened(made: Path) -> None:
    os.close(open_own(made.name))


def test_memory_that_others_can_read_is_refused(made: Path) -> None:
    made.chmod(0o640)
    with pytest.raises(WeightSyncError, match="with mode 640; it must be private to this user"):
        open_own(made.name)


def test_memory_of_another_user_is_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: made.stat().st_uid + 1)
    with pytest.raises(WeightSyncError, match=f"is of user {made.stat().st_uid} "):
        open_own(made.name)


def test_a_link_is_not_followed(made: Path) -> None:
    link = SHM_DIR / new_name()
    link.symlink_to(made)
    try:
        with pytest.raises(WeightSyncError, match="symbolic links"):
            open_own(link.name)
    finally:
        link.unlink()


@settings(deadline=None, database=None, derandomize=True)
@given(st.one_of(st.text(), st.text().map(PREFIX.__add__)))
def test_any_name_is_opened_or_refused(name: str) -> None:
    with pytest.raises(WeightSyncError):
        open_own(name)


def test_names_are_random() -> None:
    assert len({new_name() for _ in range(100)}) == 100
    assert len(new_name().rpartition("-")[2]) >= 16, "64 random bits"
