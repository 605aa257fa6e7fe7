# SPDX-License-Identifier: Apache-2.0
"""A rank counts the tokens of requests wherever the scheduler keeps them, and all ranks fail together."""

from __future__ import annotations

from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.verl_bridge.rollout.sglang.calls import SchedulerFailure
from recipe.async_pipeline.verl_bridge.rollout.sglang.rank import EngineRank, _Outcome
from recipe.async_pipeline.weight_sync.engine import serving_rank as module
from recipe.async_pipeline.weight_sync.engine.serving_rank import ServingRank, StagingBoard
from recipe.async_pipeline.weight_sync.engine.versioned_engine import Salts
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest, encode
from tests import HANG_S
from tests.fakes.adapter_contract import PIECE_BYTES, order_of_loads
from tests.fakes.engine import FakeEngine, weights


def request(rid: str, tokens: int = 0, *, finished: bool = False, **more: Any) -> Any:
    described = {
        "rid": rid,
        "output_ids": list(range(tokens)),
        "output_token_logprobs_val": [0.5] * tokens,
        "extra_key": "v1",
        "lora_id": None,
        "is_chunked": 0,
        "finished": lambda: finished,
    }
    return SimpleNamespace(**{**described, **more})


def batch(*requests: Any, extend: bool = False) -> Any:
    return SimpleNamespace(reqs=list(requests), forward_mode=SimpleNamespace(is_extend=lambda: extend))


def scheduler(**more: Any) -> Any:
    described = {
        "tp_cpu_group": SimpleNamespace(size=lambda: 1),
        "running_batch": batch(),
        "last_batch": None,
        "chunked_req": None,
        "waiting_queue": [],
        "grammar_manager": SimpleNamespace(grammar_queue=[]),
    }
    return SimpleNamespace(**{**described, **more})


def serving(**of_adapter: Any) -> ServingRank:
    adapter: Any = SimpleNamespace(device=torch.device("cpu"), **of_adapter)
    return ServingRank(adapter)


def rank(engine: Any) -> EngineRank:
    return EngineRank(engine, serving(), lambda mine: [mine])


EMPTY = encode(Manifest(version=1, tensors=(), buckets=(), samples=()))


def loaded(engine: Any, salts: Salts | None = None) -> dict[str, int]:
    """Load a version without tensors; returns the tokens of each live request."""
    mine = EngineRank(engine, serving(), lambda mine: [_Outcome({})])
    return mine.load(EMPTY, 64, salts)[1]


def test_each_live_request_is_counted_once_wherever_it_is() -> None:
    running, prefilled, chunked = request("a", 3), request("b", 1), request("c", is_chunked=1)
    engine = scheduler(
        running_batch=batch(running, request("gone", 4, finished=True)),
        last_batch=batch(prefilled, running),
        chunked_req=chunked,
        waiting_queue=[request("d"), request("retracted", 7)],
        grammar_manager=SimpleNamespace(grammar_queue=[request("e")]),
    )
    assert loaded(engine) == {"a": 3, "b": 1, "c": 0, "d": 0, "retracted": 7, "e": 0}


def test_a_token_that_is_sampled_but_not_processed_is_counted() -> None:
    """With overlap, the scheduler launches a step before it has processed the one before."""
    decoding, last_chunk, chunk = request("a", 3), request("b"), request("c", is_chunked=1)
    engine = scheduler(
        running_batch=batch(decoding),
        last_batch=batch(last_chunk),
        chunked_req=chunk,
        result_queue=[(batch(decoding), None), (batch(last_chunk, chunk, extend=True), None)],
    )
    assert loaded(engine) == {"a": 4, "b": 1, "c": 0}


def test_what_was_written() -> None:
    silent = request("b", 2, output_token_logprobs_val=None)
    engine = scheduler(running_batch=batch(request("a", 2), silent, request("c", 1)))
    assert rank(engine).written(["a", "b", "unknown"]) == {"a": ([0, 1], [0.5, 0.5]), "b": ([0, 1], None)}


def test_requests_without_a_step_use_the_prefixes_of_the_new_version() -> None:
    waiting, retracted, shared = request("a"), request("b", 2), request("c", extra_key=None)
    adapted, running = request("d", extra_key="v1x", lora_id="x"), request("e")
    of_session, of_adapted_session = request("f", extra_key="v0"), request("g", extra_key="v0x", lora_id="x")
    queue = [waiting, retracted, shared, adapted, of_session, of_adapted_session]
    loaded(scheduler(running_batch=batch(running), waiting_queue=queue), Salts("v1", "v2"))
    keys = [one.extra_key for one in (*queue, running)]
    assert keys == ["v2", "v1", None, "v2x", "v0", "v0x", "v1"]


def test_a_failure_of_another_rank_is_raised_on_all() -> None:
    failed = _Outcome(failure=SchedulerFailure.of(ProofError("v1: other values")))
    mine = EngineRank(scheduler(), serving(), lambda mine: [_Outcome({}), failed])
    with pytest.raises(ProofError, match="^v1: other values$"):
        mine.load(EMPTY, 64, None)


def test_a_load_waits_for_the_device_and_is_reported_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, writer = FakeEngine(), ArenaWriter(1 << 12, 1000, None)
    mine = EngineRank(
        scheduler(running_batch=batch(request("a", 3))),
        ServingRank(adapter),
        lambda mine: [mine],
    )
    order = order_of_loads(adapter, monkeypatch)
    with closing(writer):
        manifest = encode(await_manifest(writer.gather(1, weights(1).items()), HANG_S))
        (report,), progress = mine.load(manifest, PIECE_BYTES, None)
    assert order == ["synchronize", "commit"]
    assert report["tensors_proved"] == len(weights(1)) and progress == {"a": 3}


def test_any_error_of_a_load_is_an_outcome() -> None:
    """Otherwise the other ranks would wait for this one."""
    gathered: list[Any] = []

    def gather(mine: Any) -> list[Any]:
        gathered.append(mine)
        return [mine, _Outcome({})]

    with pytest.raises(WeightSyncError):
        EngineRank(scheduler(), serving(), gather).load(b"no manifest", 64, None)
    assert len(gathered) == 1


def test_a_rank_that_cannot_stage_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other ranks would wait for this one."""
    gathered: list[Any] = []

    def fail(*arguments: Any) -> bool:
        raise MemoryError("no standby copy")

    def gather(mine: Any) -> list[Any]:
        gathered.append(mine)
        return [mine, "board"]

    with ExitStack() as boards:
        monkeypatch.setattr(module, "StagingBoard", lambda: boards.enter_context(closing(StagingBoard())))
        with pytest.raises(WeightSyncError, match="no standby copy"):
            EngineRank(scheduler(), serving(prepare=fail), gather).stage(EMPTY)
    assert len(gathered) == 1


def test_a_rank_that_another_one_keeps_from_staging_raises_too() -> None:
    failed = SchedulerFailure.of(ProofError("v1: other values"))
    staging = EngineRank(scheduler(), serving(), lambda mine: ["board", failed])
    with pytest.raises(ProofError, match="^v1: other values$"):
        staging.stage(b"no manifest")


def test_a_frozen_scheduler_takes_no_step() -> None:
    engine = scheduler(_engine_paused=False)
    rank(engine).freeze(True)
    assert vars(engine)["_engine_paused"], "SGLang's own flag"
