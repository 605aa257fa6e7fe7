# SPDX-License-Identifier: Apache-2.0
"""The plugin adds a method to the engine core that loads weights and counts tokens."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import Future
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge.rollout.vllm.plugin import (
    keep_prefixes_apart,
    load_snapshot,
    output_tokens,
    register,
)
from recipe.async_pipeline.weight_sync.memory.segment_names import SHM_DIR, sweep_orphans


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


def rank(pipe: Connection) -> None:
    register()
    pipe.send(shared_memory.SharedMemory(create=True, size=64).name)
    pipe.recv()


def test_messages_of_a_rank_that_is_killed_with_its_tracker_are_swept() -> None:
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    process = spawned.Process(target=rank, args=(theirs,))
    process.start()
    name = ours.recv()
    segment = SHM_DIR / name
    sweep_orphans()
    assert segment.exists()
    process.kill()
    process.join()
    sweep_orphans()
    assert not segment.exists()


def core_with(live: dict[str, int], *in_flight: dict[str, list[int]] | None) -> Any:
    """Return an engine core with the output tokens of its live requests, and steps of unread outputs."""
    queue = []
    for tokens in in_flight:
        step: Future[Any] = Future()
        # As vLLM: a step that fails has no output, and one that only reads prompts no list of tokens.
        lists = list(tokens.values()) if tokens and any(tokens.values()) else []
        output = (
            SimpleNamespace(req_ids=list(tokens), sampled_token_ids=lists) if tokens is not None else None
        )
        step.set_result(output)
        queue.append((step, "what was scheduled", "the model's part"))
    requests = {name: SimpleNamespace(num_output_tokens=tokens) for name, tokens in live.items()}
    return SimpleNamespace(scheduler=SimpleNamespace(requests=requests), batch_queue=queue or None)


def test_a_load_counts_the_tokens_of_live_requests() -> None:
    def collective_rpc(method: str, timeout_s: float, args: tuple[Any, ...]) -> list[Any]:
        assert (method, timeout_s, args) == ("load_snapshot", 9.0, (b"manifest", 64))
        return [({"load_s": 1.0}, None), ({"load_s": 2.0}, None)]

    core = core_with({"a": 3, "b": 2}, {"a": [7]})
    core.collective_rpc = collective_rpc
    reports, progress = load_snapshot(core, b"manifest", 64, 9.0, None)
    assert reports == [{"load_s": 1.0}, {"load_s": 2.0}]
    assert progress == {"a": 4, "b": 2}


def test_tokens_of_steps_in_flight_count_as_written_before_the_load() -> None:
    live = {"plain": 3, "drafts": 5, "reads its prompt": 0, "waits": 0}
    step = {"plain": [1], "drafts": [4, 5, 6], "reads its prompt": [], "aborted": [8]}
    assert output_tokens(core_with(live)) == live, "without async scheduling"
    assert output_tokens(core_with(live, step)) == {**live, "plain": 4, "drafts": 8}
    assert output_tokens(core_with(live, step, {"plain": [2]})) == {**live, "plain": 5, "drafts": 8}
    assert output_tokens(core_with(live, {"reads its prompt": []}, None)) == live


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
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    assert {"collective_rpc"} <= set(dir(EngineCore))
    assert {"update_block_hashes", "num_output_tokens"} <= set(dir(Request))
    assert {"req_ids", "sampled_token_ids"} <= set(ModelRunnerOutput.__dataclass_fields__)
