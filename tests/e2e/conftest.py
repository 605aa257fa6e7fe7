# SPDX-License-Identifier: Apache-2.0
"""The toy task, made once for all jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.job import ROOT


def _make(*options: str) -> Path:
    command = [sys.executable, "-m", "recipe.async_pipeline", "task", "make", *options]
    return Path(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip())


@pytest.fixture(scope="session")
def tied_task() -> Path:
    return _make("--tied")


@pytest.fixture(scope="session")
def untied_task() -> Path:
    return _make("--untied")
