# SPDX-License-Identifier: Apache-2.0
"""Processes are found by an inherited environment variable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from recipe.async_pipeline.lab.soak.processes import processes_with, send

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
            send(one.pid, signal.SIGKILL)
        process.wait()
    while processes_with(mark, "1"):
        pass
    assert not send(process.pid, signal.SIGTERM)
