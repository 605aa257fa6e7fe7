# SPDX-License-Identifier: Apache-2.0
"""A job writes to its log, ends with its processes, and they are found by an inherited variable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.lab import job
from recipe.async_pipeline.lab.job import JobProcess, last_error, processes_with
from recipe.async_pipeline.processes import send_signal
from tests import HANG_S

SLEEPS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


def test_grandchildren_are_found_until_they_end() -> None:
    mark = f"ASYNC_PIPELINE_TEST_{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS + "; print()"],
        env={**os.environ, mark: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        while len(found := processes_with(mark, "1")) < 2:
            assert process.poll() is None
        assert all(sys.executable in one.command for one in found)
        assert processes_with(mark, "2") == []
        for one in found:
            send_signal(one.pid, signal.SIGKILL)
        process.wait()
    while processes_with(mark, "1"):
        pass
    assert not send_signal(process.pid, signal.SIGTERM)


def test_a_process_is_found_in_the_middle_of_an_exec(tmp_path: Path) -> None:
    """Its environment and its command line are empty for a moment."""
    mark, script = f"ASYNC_PIPELINE_TEST_EXEC_{os.getpid()}", tmp_path / "script"
    script.write_text('[ "$LEFT" = 0 ] && exec sleep 1000; export LEFT=$((LEFT - 1)); exec bash "$0"')
    process = subprocess.Popen(["bash", str(script)], env={**os.environ, mark: "1", "LEFT": "500"})
    try:
        commands = [""]
        while not commands[-1].startswith("sleep"):
            commands += [one.command for one in processes_with(mark, "1")] or [""]
        assert "" not in commands[1:]
    finally:
        process.kill()
        process.wait()


def test_a_process_is_found_while_its_shell_reads_its_environment() -> None:
    """For a moment, a shell has a zero in place of each `=`."""
    mark = f"ASYNC_PIPELINE_TEST_SHELL_{os.getpid()}"
    code = f"""import ctypes
block = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
place = next(at for at in block if ctypes.string_at(at).startswith(b"{mark}="))
ctypes.memset(place + {len(mark)}, 0, 1)
print(flush=True)
input()"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env={**os.environ, mark: "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert [one.pid for one in processes_with(mark, "1")] == [process.pid]
        assert processes_with(mark, "") == []
        process.kill()


def test_a_job_writes_its_log_and_is_looked_at(tmp_path: Path) -> None:
    log, looks = tmp_path / "log", list[float]()
    process = JobProcess(["bash", "-c", "echo $WORD; exit 3"], log, {"WORD": "one"})
    assert process.wait(HANG_S, looks.append) == 3 and process.has_ended
    assert log.read_text() == "one\n"
    assert looks and looks == sorted(looks)
    assert last_error(log.read_text()) == "no exception in the log"


def test_a_job_without_end_continues_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "LOOK_S", 0.01)
    process = JobProcess(["sleep", "1000"], tmp_path / "log", {})
    with pytest.raises(TimeoutError, match=r"still running after 0\.02 s; see .*log"):
        process.wait(0.02)
    assert not process.has_ended
    process.stop()
    assert process.has_ended


def test_the_processes_of_a_job_end_with_it(tmp_path: Path) -> None:
    mark = f"ASYNC_PIPELINE_TEST_TREE_{os.getpid()}"
    process = JobProcess(["bash", "-c", "sleep 1000 & sleep 1000"], tmp_path / "log", {mark: "1"})
    while len(processes_with(mark, "1")) < 3:
        assert not process.has_ended
    process.end_tree()
    assert processes_with(mark, "1") == []


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("x\n  1.0 s  (WorkerDict pid=7) AssertionError: odd\n  2.0 s  done", "AssertionError: odd"),
        ("ray.exceptions.RayTaskError(ValueError): long\nValueError: short\nend", "ValueError: short"),
        ("all is well", "no exception in the log"),
    ],
)
def test_last_error_finds_the_last_exception_of_a_log(log: str, expected: str) -> None:
    assert last_error(log) == expected
