# SPDX-License-Identifier: Apache-2.0
"""A folder belongs to one run at a time, and to no run once its processes have ended."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipe.async_pipeline.checkpoint import owner
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.soak.small_disk import empty, fill, small_disk

TAKES = """\
import sys
from pathlib import Path
from recipe.async_pipeline.checkpoint import owner
owner.hold("key", Path(sys.argv[1]), sys.argv[2], print)
print("has it", flush=True)
sys.stdin.read()
"""
Start = Callable[[Path, str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a process that has a lock."""
    started = []

    def start(folder: Path, name: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", TAKES, str(folder), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "has it\n"
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def test_a_second_run_is_refused_with_the_owner(tmp_path: Path, start: Start) -> None:
    other = start(tmp_path, owner.DRIVER)
    with pytest.raises(ConfigError) as refused:
        owner.own({owner.RUN_DIR: tmp_path}, print)
    assert re.fullmatch(
        rf"{re.escape(owner.RUN_DIR)} must be the folder of one run at a time, got {tmp_path}, which belongs "
        rf"to process {other.pid} on {re.escape(os.uname().nodename)} since .* UTC; end that run or wait .*",
        str(refused.value),
    )

    other.send_signal(signal.SIGKILL)
    other.wait()
    owner.own({owner.RUN_DIR: tmp_path}, print)
    owner.own({owner.RUN_DIR: tmp_path}, print)
    assert start(tmp_path / "..", owner.DRIVER).poll() is None, "other folders are free"


def test_a_run_that_is_refused_makes_no_folder(tmp_path: Path, start: Start) -> None:
    (tmp_path / "root").mkdir()
    start(tmp_path / "root", owner.DRIVER)
    with pytest.raises(ConfigError, match=owner.ROOT):
        owner.own({owner.RUN_DIR: tmp_path / "run", owner.ROOT: tmp_path / "root"}, print)
    assert not (tmp_path / "run").exists()


def test_a_trainer_that_outlives_its_driver_is_waited_for(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "ENDS_S", 0.0)
    trainer = start(tmp_path, owner.TRAINER)
    with pytest.raises(ConfigError, match=f"{owner.ROOT} .* belongs to process {trainer.pid} on"):
        owner.own({owner.ROOT: tmp_path}, print)

    monkeypatch.setattr(owner, "ENDS_S", 30.0)
    assert trainer.stdin is not None
    trainer.stdin.close()
    owner.own({owner.ROOT: tmp_path}, print)


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    lines: list[str] = []
    owner.own({owner.RUN_DIR: tmp_path}, lines.append)
    assert f"{tmp_path} cannot be locked (Operation not supported); do not start a second run in it" in lines


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"run_dir must be a writable folder, got {tmp_path}/file/run \("):
        owner.own({owner.RUN_DIR: tmp_path / "file" / "run"}, print)


def test_a_folder_on_a_full_disk_is_named_and_not_kept(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with small_disk(tmp_path / "disk") as disk:
        run_dir = disk / "run"
        run_dir.mkdir()
        fill(disk)
        with pytest.raises(
            ConfigError, match=rf"run_dir must be a writable folder, got {run_dir} \(No space"
        ):
            owner.own({owner.RUN_DIR: run_dir}, print)
        empty(disk)
        with (run_dir / owner.DRIVER).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
