# SPDX-License-Identifier: Apache-2.0
"""verl's worker hands the trajectories of a session to the one who asked for them, else to TransferQueue."""

from __future__ import annotations

import asyncio
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from recipe.async_pipeline.verl_bridge import replaced
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def sessions(load: Load) -> ModuleType:
    module = load("recipe.async_pipeline.verl_bridge.agent_loop.stored_sessions")
    replaced.apply("agent loops")
    return module


@pytest.fixture
def worker(load: Load, sessions: ModuleType) -> Any:
    """verl's worker, without an engine and without scores."""
    stock: Any = load(
        "verl.trainer.ppo.v1.agent_loop_tq"
    ).AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__

    class Worker(stock):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        async def _compute_score(self, *args: Any, **kwargs: Any) -> None: ...

        async def _compute_teacher_logprobs(self, *args: Any, **kwargs: Any) -> None: ...

        def _compute_multi_modal_inputs(self, *args: Any) -> dict[str, Any]:
            return {}

        def _compute_position_ids(self, ids: Any, *args: Any) -> Any:
            return torch.arange(ids.shape[1])[None]

    return Worker()


def answer(load: Load) -> Any:
    return load("verl.experimental.agent_loop").AgentLoopOutput(
        prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 1], num_turns=2, metrics={}
    )


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch, load: Load) -> mock.AsyncMock:
    """The calls that TransferQueue would get."""
    fake = mock.AsyncMock()
    monkeypatch.setattr(load("transfer_queue"), "async_kv_batch_put", fake)
    return fake


async def test_a_session_is_handed_over_as_rows(
    load: Load, sessions: ModuleType, worker: Any, put: mock.AsyncMock
) -> None:
    stored: list[Any] = []

    async def store(keys: Any, fields: Any, tags: Any, partition_id: str) -> None:
        stored.append((keys, fields[0]["uid"], tags[0]["seq_len"], partition_id))

    with sessions.stored_by(store):
        await worker._agent_loop_postprocess(answer(load), False, uid="u", session_id=0, global_steps=1)
    assert stored == [(["u_0_0"], "u", 3, "train")]
    assert not put.called


async def test_others_are_stored_as_verl_does(
    load: Load, sessions: ModuleType, worker: Any, put: mock.AsyncMock
) -> None:
    """Also at the same time in another task of the process."""
    handed: list[Any] = []

    async def store(keys: Any, fields: Any, tags: Any, partition_id: str) -> None:
        handed.append(keys)

    async def session(name: str) -> None:
        await worker._agent_loop_postprocess(answer(load), True, uid=name, session_id=0, global_steps=1)

    with sessions.stored_by(store):
        kept = asyncio.create_task(session("a"))
    await session("b")
    await kept
    assert handed == [["a_0_0"]]
    (call,) = put.call_args_list
    assert (call.kwargs["keys"], call.kwargs["partition_id"]) == (["b_0_0"], "val")
    assert call.kwargs["fields"]["responses"][0].tolist() == [2, 3]


def test_put_stores_rows_as_columns(load: Load, sessions: ModuleType, put: mock.AsyncMock) -> None:
    rows = [{"responses": torch.tensor([1, 2])}, {"responses": torch.tensor([3])}]
    asyncio.run(sessions.put(["a", "b"], rows, [{}, {}], "train"))
    fields = put.call_args.kwargs["fields"]
    assert [row.tolist() for row in fields["responses"]] == [[1, 2], [3]]


def test_other_calls_reach_transfer_queue(load: Load, sessions: ModuleType) -> None:
    seen = load("verl.trainer.ppo.v1.agent_loop_tq").tq
    assert seen.async_kv_put is load("transfer_queue").async_kv_put
    with pytest.raises(AttributeError):
        _ = seen.no_such_call


def test_what_a_checkpoint_cannot_hold_is_stored_as_its_text(
    sessions: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    info = {"seen": {1, 2}, "verdict": SimpleNamespace(a=1)}
    row = {"uid": "a", "extra_fields": {"reward_extra_info": info}, "tool": len}
    first, second = sessions.storable_rows([row, row])
    assert first == second
    assert first["extra_fields"]["reward_extra_info"] == {"seen": {1, 2}, "verdict": "namespace(a=1)"}
    assert first["tool"] == "<built-in function len>"
    assert [one.getMessage().split(",")[0] for one in caplog.records] == [
        "extra_fields.reward_extra_info.verdict is a types.SimpleNamespace",
        "tool is a builtins.builtin_function_or_method",
    ]
