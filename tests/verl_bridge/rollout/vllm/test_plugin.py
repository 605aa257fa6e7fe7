# SPDX-License-Identifier: Apache-2.0
"""The plugin adds a method to the engine core that loads weights and counts tokens."""

from __future__ import annotations

import multiprocessing
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge.rollout.vllm.plugin import keep_prefixes_apart, load_snapshot, register


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> type:
    """Replace vLLM's engine core, whose import takes seconds, by a new class for each test."""
    module = ModuleType("vllm.v1.engine.core")
    module.EngineCore = type("EngineCore", (), {})  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made: type = module.EngineCore  # type: ignore[attr-defined]
    return made


def test_every_engine_core_can_load(monkeypatch: pytest.MonkeyPatch, core: Any) -> None:
    register()
    assert not hasattr(core, "load_snapshot"), "only engine core processes get it"
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP0")
    register()
    assert core.load_snapshot is load_snapshot


def test_a_load_counts_the_tokens_of_live_requests() -> None:
    def collective_rpc(method: str, timeout_s: float, args: tuple[Any, ...]) -> list[Any]:
        assert (method, timeout_s, args) == ("load_snapshot", 9.0, (b"manifest", 64))
        # `done` is finished; the scheduler does not know the last token of `a` yet; `b` waits.
        return [({"load_s": 1.0}, {"a": 4, "done": 7}, None), ({"load_s": 2.0}, {"a": 4}, None)]

    live = {"a": SimpleNamespace(num_output_tokens=3), "b": SimpleNamespace(num_output_tokens=2)}
    core = SimpleNamespace(collective_rpc=collective_rpc, scheduler=SimpleNamespace(requests=live))
    reports, progress = load_snapshot(core, b"manifest", 64, 9.0, None)
    assert reports == [{"load_s": 1.0}, {"load_s": 2.0}]
    assert progress == {"a": 4, "b": 2}


class Waiting:
    """The attributes of a request of vLLM's scheduler that are used."""

    def __init__(self, salt: str | None, computed: int = 0, written: int = 0) -> None:
        self.cache_salt, self.num_computed_tokens, self.num_output_tokens = salt, computed, written
        self.block_hashes = [f"{salt}: block"]

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"{self.cache_salt}: block")


def test_requests_without_a_step_use_the_prefixes_of_the_new_version() -> None:
    waiting, late, of_session = Waiting("v1"), Waiting("5eedf00d"), Waiting("v0")
    shared, prefilling, preempted = Waiting(None), Waiting("v1", computed=4), Waiting("v1", written=2)
    requests = [waiting, late, of_session, shared, prefilling, preempted]
    keep_prefixes_apart(requests, ["v1", "v2"])
    assert [one.cache_salt for one in requests] == ["v2", "v2", "v0", None, "v1", "v1"]
    assert [one.block_hashes for one in requests] == [[f"{one.cache_salt}: block"] for one in requests]


@pytest.mark.real_engine
def test_vllm_has_the_methods_that_are_used() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    assert {"collective_rpc"} <= set(dir(EngineCore))
    assert "update_block_hashes" in dir(Request)
