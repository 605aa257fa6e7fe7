# SPDX-License-Identifier: Apache-2.0
"""A reward worker receives the whole DataProto of verl's agent loop and returns its result."""

from __future__ import annotations

import asyncio
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.errors import RewardError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def module(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.reward.worker")


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


def test_a_reward_function_that_calls_exit_raises_an_error(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the worker's own process, SystemExit would silently end the event loop."""

    def exits(**_: Any) -> float:
        raise SystemExit(3)

    def init_reward_fn(worker: Any) -> None:
        worker.reward_manager = SimpleNamespace(compute_score=exits)

    monkeypatch.setattr(module.RewardLoopWorker, "_init_reward_fn", init_reward_fn)
    worker = object.__new__(module.PlainRewardLoopWorker)
    worker._init_reward_fn()
    with pytest.raises(RewardError, match="raised: exits: SystemExit: 3"):
        worker.reward_manager.compute_score(solution_str="46")
