# SPDX-License-Identifier: Apache-2.0
"""A reward worker receives the whole DataProto of verl's agent loop and returns its result."""

from __future__ import annotations

import asyncio
import enum
import pickle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.errors import RewardError
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from tests import FAKES
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
ROW = {
    "raw_prompt": [{"role": "user", "content": "1+1="}],
    "data_source": "addition",
    "reward_model": {"ground_truth": "2"},
    "extra_info": {},
    "index": 3,
    "session_id": 1,
}


def responses(rows: int) -> Any:
    """Return the DataProto that verl's agent loop builds for the outputs of one response."""
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    tensors = {
        name: torch.arange(rows * 5).reshape(rows, 5)
        for name in ("prompts", "responses", "attention_mask", "input_ids")
    }
    tensors["position_ids"] = torch.arange(rows * 20).reshape(rows, 4, 5)
    prompt = [{"role": "user", "content": "1+1="}]
    others = {
        "raw_prompt": np.array([prompt] * rows),
        "data_source": np.array(["addition"] * rows),
        "reward_model": np.array([{"ground_truth": "2"}] * rows),
        "tool_extra_fields": np.array([{"turn_scores": []}] * rows, dtype=object),
        "prompt_len": np.array([5] * rows),
    }
    return DataProto(batch=TensorDict(tensors, batch_size=rows), non_tensor_batch=others)


class Worker:
    """A handle that pickles its arguments as Ray does, into read-only arrays."""

    def __init__(self, worker: Any) -> None:
        self.compute_plain = SimpleNamespace(remote=self._call)
        self._worker = worker

    async def _call(self, plain: Any) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        packed = pickle.dumps(plain, protocol=5, buffer_callback=buffers.append)
        got = pickle.loads(packed, buffers=[bytes(buffer) for buffer in buffers])
        assert not got.tensors["prompts"].flags.writeable
        return await self._worker.compute_plain(got)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_reward_manager_receives_all_data(module: ModuleType, rows: int) -> None:
    class RecordingWorker(module.PlainRewardLoopWorker):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            """Without a tokenizer and a reward manager."""

        async def compute_score(self, data: Any) -> dict[str, Any]:
            self.seen = data
            return {"reward_score": 0.5, "reward_extra_info": {"acc": 1}}

    worker, made = RecordingWorker(), responses(rows)
    result = asyncio.run(module.PlainCaller(Worker(worker)).compute_score.remote(made))
    assert result == {"reward_score": 0.5, "reward_extra_info": {"acc": 1}}
    assert len(worker.seen) == rows
    assert worker.seen.batch.keys() == made.batch.keys()
    for name, tensor in made.batch.items():
        assert worker.seen.batch[name].equal(tensor)
        worker.seen.batch[name][:] = 0  # a reward manager may write to its tensors
    assert worker.seen.non_tensor_batch.keys() == made.non_tensor_batch.keys()
    for name, array in made.non_tensor_batch.items():
        assert worker.seen.non_tensor_batch[name].dtype == array.dtype
        np.testing.assert_array_equal(worker.seen.non_tensor_batch[name], array)
    assert worker.seen[0:1].non_tensor_batch["data_source"].tolist() == ["addition"]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_result_needs_no_module_of_the_reward_file(
    module: ModuleType, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a time limit the function runs in the worker, and its result goes to other processes."""
    Colour = enum.Enum("Colour", {"RED": 1}, module="rewards_of_a_user")  # noqa: N806

    async def scored(*given: Any) -> dict[str, Any]:
        return {"reward_score": 0.5, "reward_extra_info": {"score": 0.5, "colour": Colour["RED"]}}

    monkeypatch.setattr(module.RewardLoopWorker, "compute_score", scored)

    class ScoringWorker(module.PlainRewardLoopWorker):  # type: ignore[name-defined, misc]
        _scorer = staticmethod(scored) if rows == 1 else None

        def __init__(self) -> None:
            """Without a tokenizer and a reward manager."""

    worker = ScoringWorker()
    made = responses(rows)
    result = asyncio.run(module.PlainCaller(Worker(worker)).compute_score.remote(made))
    assert result["reward_extra_info"] == {"score": 0.5, "colour": "Colour.RED"}
    assert asyncio.run(worker.compute_score(made))["reward_extra_info"]["colour"] == "Colour.RED"


def outputs(rows: int, module: Any) -> list[Any]:
    """Return the outputs of an agent loop."""
    return [
        module.AgentLoopOutput(
            prompt_ids=list(range(5 + row)),
            response_ids=list(range(3 - row)),
            response_mask=[1] * (3 - row),
            num_turns=2 + row,
            metrics={},
            extra_fields={"turn_scores": [], "min_global_steps": row},
        )
        for row in range(rows)
    ]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_response_becomes_the_data_that_verl_makes(load: Load, module: ModuleType, rows: int) -> None:
    verl = load("verl.experimental.agent_loop.agent_loop")
    kwargs = {**ROW, "dummy_tensor": load("torch").tensor([0], dtype=load("torch").uint8)}
    seen: list[Any] = []

    async def compute_score(data: Any) -> dict[str, Any]:
        seen.append(data)
        return {"reward_score": 0.5, "reward_extra_info": {}}

    worker = SimpleNamespace(
        reward_loop_worker_handles=[SimpleNamespace(compute_score=SimpleNamespace(remote=compute_score))],
        processor=None,
        mm_processor_kwargs={},
    )
    for name in ("_compute_multi_modal_inputs", "_compute_position_ids", "_get_mm_processor_kwargs"):
        setattr(worker, name, getattr(verl.AgentLoopWorker, name).__get__(worker))
    made = outputs(rows, verl)
    sent = pickle.loads(
        pickle.dumps(
            load("recipe.async_pipeline.verl_bridge.reward.responses").Response.of(made, kwargs), protocol=5
        )
    ).data()
    asyncio.run(verl.AgentLoopWorker._compute_score(worker, made, kwargs))

    (stock,) = seen
    assert sent.batch.keys() == stock.batch.keys()
    for name, tensor in stock.batch.items():
        assert sent.batch[name].dtype == tensor.dtype
        assert sent.batch[name].equal(tensor)
    assert list(sent.non_tensor_batch) == list(stock.non_tensor_batch)
    for name, array in stock.non_tensor_batch.items():
        assert (sent.non_tensor_batch[name].dtype, sent.non_tensor_batch[name].shape) == (
            array.dtype,
            array.shape,
        )
    stock.non_tensor_batch["tool_extra_fields"][-1].pop("reward_extra_info")  # verl's, after the call
    for name, array in stock.non_tensor_batch.items():
        assert sent.non_tensor_batch[name].tolist() == array.tolist()


def test_a_reward_function_that_calls_exit_raises_an_error(
    load: Load, module: ModuleType, tmp_path: Path
) -> None:
    """In the worker's own process, SystemExit would silently end the event loop."""
    from omegaconf import OmegaConf

    make_tokenizer().save_pretrained(tmp_path)
    function = {"path": str(FAKES / "reward_functions.py"), "name": "strange", "reward_kwargs": {}}
    reward = {
        "custom_reward_function": function,
        "reward_manager": {"source": "register", "name": "naive"},
        "reward_model": {"enable": False},
    }
    model = {"tokenizer_path": None, "path": str(tmp_path)}
    config = OmegaConf.create({"actor_rollout_ref": {"model": model}, "reward": reward})
    ids = make_tokenizer().encode("exit")
    response = load("recipe.async_pipeline.verl_bridge.reward.responses").Response(
        [[1]], [ids], [2], [{}], ROW
    )

    async def score() -> Any:
        return await module.PlainRewardLoopWorker(config).compute_plain(response)

    with pytest.raises(RewardError, match="raised: .*: SystemExit: 3"):
        asyncio.run(score())
