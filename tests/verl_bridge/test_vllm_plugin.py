# SPDX-License-Identifier: Apache-2.0
"""The engine core gets a load that counts tokens; that of a CPU run is told to fork and to spin briefly."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge.vllm_plugin import LOOK_AGAIN_MS, SPIN_S, load_snapshot, register

BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class SpinCondition:
    """As vLLM's: how long a reader spins is an option of its constructor."""

    def __init__(self, is_reader: bool, busy_loop_s: float = 1) -> None:
        self.busy_loop_s = busy_loop_s


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In the place of vLLM's modules, new for each test: the real ones take seconds to import."""
    broadcast, core = ModuleType(BROADCAST), ModuleType("vllm.v1.engine.core")
    broadcast.SHM_READER_RECHECK_INTERVAL_MS = 5000  # type: ignore[attr-defined]
    broadcast.SpinCondition = type("SpinCondition", (SpinCondition,), {})  # type: ignore[attr-defined]
    core.EngineCore = type("EngineCore", (), {})  # type: ignore[attr-defined]
    for module in (broadcast, core):
        parent = module.__name__.rpartition(".")[0]
        package = ModuleType(parent)
        setattr(package, module.__name__.rpartition(".")[2], module)
        monkeypatch.setitem(sys.modules, parent, package)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm", "vllm.distributed", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return SimpleNamespace(broadcast=broadcast, core=core.EngineCore)


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
@pytest.mark.usefixtures("stand_ins")
def test_who_forks(monkeypatch: pytest.MonkeyPatch, platform: str, process: str, expected: str) -> None:
    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setenv(METHOD, "spawn")
    monkeypatch.setattr(multiprocessing.current_process(), "name", process)
    register()
    assert os.environ[METHOD] == expected


@pytest.mark.parametrize(("process", "expected"), [("EngineCore", (SPIN_S, LOOK_AGAIN_MS)), ("MainProcess", (1, 5000))])
def test_who_spins_briefly(
    monkeypatch: pytest.MonkeyPatch, stand_ins: SimpleNamespace, process: str, expected: tuple[float, int]
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv(METHOD, "spawn")
    monkeypatch.setattr(multiprocessing.current_process(), "name", process)
    register()
    register()
    changed = stand_ins.broadcast
    assert (changed.SpinCondition(True).busy_loop_s, changed.SHM_READER_RECHECK_INTERVAL_MS) == expected


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_every_engine_core_can_load(
    monkeypatch: pytest.MonkeyPatch, stand_ins: SimpleNamespace, platform: str
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setenv(METHOD, "spawn")
    register()
    assert not hasattr(stand_ins.core, "load_snapshot"), "other processes have no core"
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP0")
    register()
    assert stand_ins.core.load_snapshot is load_snapshot


def test_a_load_counts_the_tokens_of_live_requests() -> None:
    def collective_rpc(method: str, timeout_s: float, args: tuple[Any, ...]) -> list[Any]:
        assert (method, timeout_s, args) == ("load_snapshot", 9.0, (b"manifest", 64))
        # `done` is finished; of `a` the last token is not known to the scheduler yet; `b` waits.
        return [({"load_s": 1.0}, {"a": 4, "done": 7}), ({"load_s": 2.0}, {"a": 4})]

    live = {"a": SimpleNamespace(num_output_tokens=3), "b": SimpleNamespace(num_output_tokens=2)}
    core = SimpleNamespace(collective_rpc=collective_rpc, scheduler=SimpleNamespace(requests=live))
    reports, progress = load_snapshot(core, b"manifest", 64, 9.0)
    assert reports == [{"load_s": 1.0}, {"load_s": 2.0}]
    assert progress == {"a": 4, "b": 2}


@pytest.mark.real_engine
def test_vllm_has_what_is_changed() -> None:
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.engine.core import EngineCore

    assert {"collective_rpc"} <= set(dir(EngineCore))
    assert inspect.signature(shm_broadcast.SpinCondition).parameters["busy_loop_s"].default == 1
    assert shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS == 5000
    assert "SHM_READER_RECHECK_INTERVAL_MS" in inspect.getsource(shm_broadcast.MessageQueue)
