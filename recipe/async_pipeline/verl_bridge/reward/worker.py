# SPDX-License-Identifier: Apache-2.0
"""How an answer gets to a reward worker.

verl pickles a DataProto, tensors in a file format of torch. For short answers that is a quarter of what an
agent loop worker does,
and more of what a reward worker does. As plain arrays it takes a fifth of that. What the reward manager gets
is the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

from .executor import only_errors


class Plain(NamedTuple):
    """A DataProto of tensors that numpy knows too, without `meta_info`."""

    tensors: Mapping[str, np.ndarray[Any, Any]]
    others: Mapping[str, np.ndarray[Any, Any]]

    @classmethod
    def of(cls, data: DataProto) -> Plain:
        return cls({name: tensor.numpy() for name, tensor in data.batch.items()}, data.non_tensor_batch)

    def data(self) -> DataProto:
        """With tensors of its own: what Ray has unpacked cannot be written to."""
        tensors = {name: torch.tensor(array) for name, array in self.tensors.items()}
        rows = len(next(iter(tensors.values())))
        return DataProto(batch=TensorDict(tensors, batch_size=rows), non_tensor_batch=dict(self.others))


class PlainRewardLoopWorker(RewardLoopWorker):  # type: ignore[misc]
    """verl's, which can also be asked plainly, and survives a reward function that calls `exit()`."""

    def _init_reward_fn(self) -> None:
        super()._init_reward_fn()
        if callable(getattr(self.reward_manager, "compute_score", None)):
            self.reward_manager.compute_score = only_errors(self.reward_manager.compute_score)

    async def compute_plain(self, answer: Plain) -> dict[str, Any]:
        """See verl's `compute_score`."""
        result: dict[str, Any] = await self.compute_score(answer.data())
        return result


class PlainCaller:
    """A reward worker's handle, in the place where verl's agent loop expects it."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def compute_score(self) -> PlainCaller:
        """verl calls its `remote`."""
        return self

    def remote(self, data: DataProto) -> Awaitable[dict[str, Any]]:
        """Have an answer scored."""
        asked: Awaitable[dict[str, Any]] = self._worker.compute_plain.remote(Plain.of(data))
        return asked
