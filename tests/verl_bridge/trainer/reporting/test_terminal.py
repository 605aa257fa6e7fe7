# SPDX-License-Identifier: Apache-2.0
"""Lines for the user, also if the disk of Ray's logs is full."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from recipe.async_pipeline.observe.table import MARK
from recipe.async_pipeline.verl_bridge.trainer.reporting.terminal import say
from tests import HANG_S, REPOSITORY


def test_a_full_disk_costs_the_line_only() -> None:
    code = f"from {say.__module__} import say; say('x')"
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=REPOSITORY, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_line_is_written_whole(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda file, text: whole(file, text[:3]))
    say("a long line")
    assert capfd.readouterr().out == f"{MARK} a long line\n"
