# SPDX-License-Identifier: Apache-2.0
"""Only the engine core of a CPU run is told to fork, and to spin briefly."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
from types import ModuleType

import pytest

from recipe.async_pipeline.verl_bridge.vllm_plugin import LOOK_AGAIN_MS, SPIN_S, register

BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class SpinCondition:
    """As vLLM's: how long a reader spins is an option of its constructor."""

    def __init__(self, is_reader: bool, busy_loop_s: float = 1) -> None:
        self.busy_loop_s = busy_loop_s


@pytest.fixture(autouse=True)
def broadcast(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for vLLM's module, with a class of its own for each test."""
    module = ModuleType(BROADCAST)
    module.SHM_READER_RECHECK_INTERVAL_MS = 5000  # type: ignore[attr-defined]
    module.SpinCondition = type("SpinCondition", (SpinCondition,), {})  # type: ignore[attr-defined]
    package = ModuleType(BROADCAST.rpartition(".")[0])
    package.shm_broadcast = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, BROADCAST, module)
    return module


@pytest.mark.parametrize(
    ("platform", "process", "expected"),
    [
        ("cpu", "EngineCore", "fork"),
        ("cpu", "EngineCore_DP0", "fork"),
        ("cpu", "MainProcess", "spawn"),
        ("cuda", "EngineCore", "spawn"),
        ("", "EngineCore", "spawn"),
    ],
)
def test_who_forks(monkeypatch: pytest.MonkeyPatch, platform: str, process: str, expected: str) -> None:
    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setenv(METHOD, "spawn")
    monkeypatch.setattr(multiprocessing.current_process(), "name", process)
    register()
    assert os.environ[METHOD] == expected


@pytest.mark.parametrize(("process", "expected"), [("EngineCore", (SPIN_S, LOOK_AGAIN_MS)), ("MainProcess", (1, 5000))])
def test_who_spins_briefly(
    monkeypatch: pytest.MonkeyPatch, broadcast: ModuleType, process: str, expected: tuple[float, int]
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv(METHOD, "spawn")
    monkeypatch.setattr(multiprocessing.current_process(), "name", process)
    register()
    register()
    assert (broadcast.SpinCondition(True).busy_loop_s, broadcast.SHM_READER_RECHECK_INTERVAL_MS) == expected


@pytest.mark.real_engine
def test_vllm_has_what_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BROADCAST, BROADCAST.rpartition(".")[0]):
        monkeypatch.delitem(sys.modules, name)
    from vllm.distributed.device_communicators import shm_broadcast

    assert inspect.signature(shm_broadcast.SpinCondition).parameters["busy_loop_s"].default == 1
    assert shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS == 5000
    assert "SHM_READER_RECHECK_INTERVAL_MS" in inspect.getsource(shm_broadcast.MessageQueue)
