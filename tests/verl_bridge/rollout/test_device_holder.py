# SPDX-License-Identifier: Apache-2.0
"""The actor that only holds devices: it answers where it is, and costs no import of the stack."""

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
from tests import REPOSITORY


async def answer() -> tuple[str, dict[str, list[str]]]:
    return "node-7", {"GPU": ["3"], "NPU": []}


def test_it_answers_the_question_that_verl_asks_a_worker() -> None:
    device: Any = ReservedDevice(SimpleNamespace(where=SimpleNamespace(remote=answer)), "GPU")

    async def ask() -> list[tuple[str, str]]:
        return list(await asyncio.gather(*[w.__ray_call__.remote(lambda self: None) for w in [device]]))

    assert asyncio.run(ask()) == [("node-7", "3")]


def test_it_ends_the_processes_that_it_is_told_and_no_others() -> None:
    with subprocess.Popen(["sleep", "600"]) as doomed, subprocess.Popen(["sleep", "600"]) as spared:
        started = psutil.Process(doomed.pid).create_time()
        another = psutil.Process(spared.pid).create_time() - 1.0
        gone = 2**22 + 1  # beyond the largest id that Linux gives
        try:
            assert DeviceReservation().end([(doomed.pid, started), (spared.pid, another), (gone, 0.0)]) == 1
            assert doomed.wait(timeout=10) == -signal.SIGKILL
            assert spared.poll() is None, "its id was another process's once"
        finally:
            spared.kill()


@pytest.mark.slow
def test_it_loads_nothing_of_the_stack() -> None:
    code = (
        "import sys, recipe.async_pipeline.verl_bridge.rollout.device_holder; "
        "sys.stdout.write(' '.join({'torch', 'verl', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout == ""
