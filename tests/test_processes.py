# SPDX-License-Identifier: Apache-2.0
"""A child process ends with its parent, gains no privileges, and process trees can be ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from recipe.async_pipeline.processes import STARTS, descendants, gain_no_rights, repeat_slow_start
from tests import HANG_S, REPOSITORY
from tests.fakes.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
PARENT = '''
import subprocess, sys, time
child = """
from recipe.async_pipeline.processes import end_with_parent; end_with_parent()
print('ready', flush=True); import time; time.sleep(600)
"""
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(600)
'''


@pytest.mark.slow
def test_a_child_is_killed_when_its_parent_is() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=HANG_S)  # of an endless sleep


def _write_own_status(file: Path) -> None:
    gain_no_rights()
    file.write_text(Path("/proc/self/status").read_text())


def test_a_child_gains_no_privileges(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(
        target=_write_own_status, args=(tmp_path / "status",)
    )
    child.start()
    child.join()
    assert "NoNewPrivs:\t1" in (tmp_path / "status").read_text()


def test_descendants_lists_children_before_grandchildren() -> None:
    nested = "sh -c 'sleep 1000 & wait' & wait"
    process = subprocess.Popen(["sh", "-c", nested], start_new_session=True)
    try:
        until(lambda: len(descendants(process.pid)) == 2, "a child and a grandchild")
        child, grandchild = descendants(process.pid)
        assert descendants(child) == [grandchild]
        assert descendants(grandchild) == []
        assert {child, grandchild} <= set(descendants(os.getpid()))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_end_all_kills_processes_that_ignore_sigterm() -> None:
    code = (
        "import subprocess, sys\n"
        "import os\nfrom recipe.async_pipeline.processes import adopt_orphans, descendants, end_all\n"
        "adopt_orphans()\n"
        "deaf = 'trap \"\" TERM; echo ready; while :; do sleep 1000; done'\n"
        "p = subprocess.Popen(['sh', '-c', deaf], stdout=subprocess.PIPE)\n"
        "p.stdout.readline()\n"
        "end_all([p.pid, 2**22 + 1], patience_s=0.2)\n"
        "left = descendants(os.getpid())\n"
        "sys.stdout.write(f'{left} {p.poll()}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=HANG_S
    )
    assert done.stdout.startswith("[] "), done.stderr


@pytest.mark.parametrize("slow", range(STARTS + 1))
def test_a_slow_start_is_repeated_without_the_rest_of_it(slow: int) -> None:
    log = list[str]()

    def start() -> str:
        log.append("start")
        if log.count("start") <= slow:
            raise RuntimeError("The current node timed out during startup.")
        return "started"

    if slow == STARTS:
        with pytest.raises(RuntimeError, match="timed out"):
            repeat_slow_start(start, lambda error: log.append("end"))
        assert log == ["start", "end"] * STARTS
    else:
        assert repeat_slow_start(start, lambda error: log.append("end")) == "started"
        assert log == [*["start", "end"] * slow, "start"]


def test_another_error_of_a_start_is_raised_at_once() -> None:
    log = list[str]()

    def start() -> None:
        log.append("start")
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        repeat_slow_start(start, lambda error: log.append("end"))
    assert log == ["start", "end"]
