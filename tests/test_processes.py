# SPDX-License-Identifier: Apache-2.0
"""A child that asked for it ends with its parent, and gains no rights."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from recipe.async_pipeline.processes import gain_no_rights

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


def test_a_child_is_killed_when_its_parent_is() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=60)  # of an endless sleep


def _tell(file: Path) -> None:
    gain_no_rights()
    file.write_text(Path("/proc/self/status").read_text())


def test_a_child_that_gains_no_rights(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_tell, args=(tmp_path / "status",))
    child.start()
    child.join()
    assert "NoNewPrivs:\t1" in (tmp_path / "status").read_text()
