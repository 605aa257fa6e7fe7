# SPDX-License-Identifier: Apache-2.0
"""Segments whose owner is gone are swept; segments of live processes are not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.memory import segment_names
from recipe.async_pipeline.weight_sync.memory.segment_names import (
    PREFIX,
    SHM_DIR,
    new_name,
    open_own,
    sweep_orphans,
)
from tests import HANG_S


def test_names_are_random_and_in_this_format() -> None:
    names = {new_name() for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith(PREFIX) and len(name.rpartition("-")[2]) >= 16 for name in names), "64 bits"


OWNER = """
import os, sys, time
from recipe.async_pipeline.weight_sync.memory.segment_names import SHM_DIR, new_name, sweep_orphans

def own():
    path = SHM_DIR / new_name()
    path.touch(mode=0o600)
    print(path, flush=True)
"""


@contextmanager
def owner(code: str, *before: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Run a process that makes a segment and then reads its standard input to the end."""
    command = [*before, sys.executable, "-c", f"{OWNER}own(); {code}sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        try:
            yield path, process
        finally:
            process.kill()
            path.unlink(missing_ok=True)


def is_swept_soon(path: Path) -> bool:
    """Return whether a segment is swept once the owner, which was killed, has ended."""
    deadline = time.monotonic() + HANG_S
    while path.exists() and time.monotonic() < deadline:
        sweep_orphans()
    return not path.exists()


def new_namespace() -> list[str]:
    """Return a command that runs another one in its own namespace of process ids, with shared memory."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no namespaces for its users")
    return command


def test_only_segments_of_dead_processes_are_swept() -> None:
    with owner("") as (dead, process), owner("") as (alive, _):
        own = SHM_DIR / new_name()
        own.touch(mode=0o600)
        try:
            assert not {dead.name, alive.name, own.name} & set(sweep_orphans())
            process.kill()
            process.wait()
            assert dead.name in sweep_orphans()
            assert not dead.exists() and alive.exists() and own.exists()
        finally:
            own.unlink()


def test_segments_of_other_namespaces_are_swept_when_their_owner_is_dead() -> None:
    with owner("", *new_namespace()) as (dead, process), owner("", *new_namespace()) as (alive, _):
        assert dead.name.split("-")[2] == alive.name.split("-")[2], "both have the same process id"
        process.kill()
        assert is_swept_soon(dead), "its parent, `unshare`, ends first"
        assert alive.exists()


def test_a_process_of_another_namespace_does_not_sweep_a_live_neighbour() -> None:
    with owner("") as (neighbour, _), owner("sweep_orphans(); own(); ", *new_namespace()) as (_, process):
        assert process.stdout is not None
        swept = Path(process.stdout.readline().strip())
        assert swept.exists()
        swept.unlink()
        assert neighbour.exists()


def test_a_live_neighbour_with_another_number_of_this_user_is_not_swept() -> None:
    """As in a rootless container that shares the host's memory."""
    command = ["unshare", "--user", "--map-user=12345"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no namespaces for its users")
    with owner("", *command) as (alive, process):
        assert alive.name not in sweep_orphans() and alive.exists()
        process.kill()
        process.wait()
        assert alive.name in sweep_orphans()
    with owner("") as (alive, _), owner("sweep_orphans(); own(); ", *command) as (_, process):
        assert process.stdout is not None
        Path(process.stdout.readline().strip()).unlink()
        assert alive.exists()
    (SHM_DIR / "async_pipeline.12345.locks").unlink(missing_ok=True)


def test_a_fork_is_another_owner_and_does_not_keep_its_parents_segments() -> None:
    code = "os.fork() or (own(), time.sleep(600)); "
    with owner(code) as (parents, process):
        assert process.stdout is not None
        inherited = Path(process.stdout.readline().strip())
        try:
            assert inherited.name.split("-")[1] != parents.name.split("-")[1]
            process.kill()
            process.wait()
            swept = sweep_orphans()
            assert parents.name in swept and inherited.name not in swept
            os.kill(int(inherited.name.split("-")[2]), signal.SIGKILL)
            assert is_swept_soon(inherited)
        finally:
            inherited.unlink(missing_ok=True)


@pytest.fixture
def orphan() -> Iterator[Path]:
    """A segment of a process that does not exist."""
    path = SHM_DIR / f"{PREFIX}{0:015x}-1-{0:016x}"
    path.touch(mode=0o600)
    yield path
    path.unlink(missing_ok=True)


def test_a_segment_that_another_process_sweeps_first_is_no_error(
    orphan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = orphan.with_name(f"{orphan.name[:-1]}1")
    new_name()  # has opened the locks
    listed = SimpleNamespace(glob=lambda of: SHM_DIR.glob(of) if "locks" in of else [gone, orphan])
    monkeypatch.setattr(segment_names, "SHM_DIR", listed)
    assert sweep_orphans() == [orphan.name]
    assert not orphan.exists()


def test_orphans_of_another_user_are_not_swept(orphan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: orphan.stat().st_uid + 1)
    assert orphan.name not in sweep_orphans()
    assert orphan.exists()


def test_names_that_this_package_does_not_give_are_not_swept() -> None:
    path = SHM_DIR / f"{PREFIX}4026531836-1-{0:016x}"
    path.touch(mode=0o600)
    try:
        assert path.name not in sweep_orphans() and path.exists()
    finally:
        path.unlink()


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
