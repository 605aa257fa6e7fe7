# SPDX-License-Identifier: Apache-2.0
"""A plan publishes 100 M parameters as Megatron-Bridge's export does, bit by bit, and in less time."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.verl_bridge.workers.megatron.gather_cost import LAYOUTS
from tests.verl_bridge.workers.megatron.layouts import ENVIRONMENT

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron"),
]

SHARE = 0.35
"""Largest share of the export's time, as a ratio of medians within one run."""


def test_parts_are_the_export_and_take_less_time(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.verl_bridge.workers.megatron.gather_cost", str(tmp_path), "5"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["layout"] for one in found] == list(LAYOUTS)
    for one in found:
        assert one["different"] == []
        assert one["ratio"] <= SHARE, one
