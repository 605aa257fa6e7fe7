# SPDX-License-Identifier: Apache-2.0
"""The actor that reserves devices reports its node and ends processes without importing verl."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from recipe.async_pipeline.verl_bridge.rollout.device_holder import DeviceReservation, ReservedDevice
from recipe.async_pipeline.weight_sync.hosts.host_slots import SAME_START_S
from tests import HANG_S, REPOSITORY


async def where() -> tuple[str, dict[str, list[str]]]:
    return "node-7", {"GPU": ["3"], "NPU": []}


async def test_it_reports_its_node_and_device_to_verl() -> None:
    device: Any = ReservedDevice(SimpleNamespace(where=SimpleNamespace(remote=where)), "GPU")

    assert list(await asyncio.gather(*[w.__ray_call__.remote(lambda self: None) for w in [device]])) == [
        ("node-7", "3")
    ]


def test_it_ends_only_the_given_processes() -> None:
    with subprocess.Popen(["sleep", "600"]) as doomed, subprocess.Popen(["sleep", "600"]) as spared:
        started = psutil.Process(doomed.pid).create_time()
        another = psutil.Process(spared.pid).create_time() - 2 * SAME_START_S
        gone = 2**22 + 1  # larger than any process id on Linux
        try:
            assert DeviceReservation().end([(doomed.pid, started), (spared.pid, another), (gone, 0.0)]) == 1
            assert doomed.wait(timeout=HANG_S) == -signal.SIGKILL
            assert spared.poll() is None, "its id belonged to another process before"
        finally:
            spared.kill()


def test_it_ends_processes_after_the_clock_was_adjusted() -> None:
    with subprocess.Popen(["sleep", "600"]) as doomed:
        # The boot time, from which start times are derived, changes with the clock.
        before = psutil.Process(doomed.pid).create_time() - 1.0
        try:
            assert DeviceReservation().end([(doomed.pid, before)]) == 1
            assert doomed.wait(timeout=HANG_S) == -signal.SIGKILL
        finally:
            doomed.kill()


@pytest.mark.slow
def test_it_imports_neither_verl_nor_an_engine() -> None:
    code = (
        "import sys, recipe.async_pipeline.verl_bridge.rollout.device_holder; "
        "sys.stdout.write(' '.join({'torch', 'verl', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout == ""
