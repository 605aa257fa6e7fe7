# SPDX-License-Identifier: Apache-2.0
"""Send responses to reward workers as lists of numbers.

verl makes a DataProto of each response and pickles it, with tensors in torch's file format. For short
responses that is half of the time of an agent loop worker. Lists take a small part of that time; the reward
worker makes the DataProto. Responses with images are sent as arrays of the DataProto that verl made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

from ..direct_calls import Address, ConnectionLost, DirectCaller, DirectCalls
from .executor import only_errors
from .naive_scoring import Scorer, scorer_of
from .visual import VisualRewardManager


class Plain(NamedTuple):
    """A DataProto as arrays, without `meta_info`; all dtypes must exist in numpy."""

    tensors: Mapping[str, np.ndarray[Any, Any]]
    others: Mapping[str, np.ndarray[Any, Any]]

    @classmethod
    def of(cls, data: DataProto) -> Plain:
        """Return the arrays of a DataProto, which share its memory."""
        return cls({name: tensor.numpy() for name, tensor in data.batch.items()}, data.non_tensor_batch)

    def data(self) -> DataProto:
        """Return the DataProto with copied tensors, because arrays that Ray unpacks are read-only."""
        tensors = {name: torch.tensor(array) for name, array in self.tensors.items()}
        rows = len(next(iter(tensors.values())))
        return DataProto(batch=TensorDict(tensors, batch_size=rows), non_tensor_batch=dict(self.others))


class Response(NamedTuple):
    """One response of a model without images, as verl's agent loop has it."""

    prompts: list[Sequence[int]]
    """Tokens before the response, for each output of the agent loop."""
    responses: list[Sequence[int]]
    num_turns: list[int]
    extra_fields: list[dict[str, Any]]
    row: dict[str, Any]
    """The row of the prompt."""

    @classmethod
    def of(cls, outputs: Sequence[Any], row: Mapping[str, Any]) -> Response:
        """Return the response with these `AgentLoopOutput`s."""
        return cls(
            [one.prompt_ids for one in outputs],
            [one.response_ids for one in outputs],
            [one.num_turns for one in outputs],
            [one.extra_fields for one in outputs],
            # torch takes a millisecond to pickle a tensor.
            {name: one.numpy() if isinstance(one, torch.Tensor) else one for name, one in row.items()},
        )

    def data(self) -> DataProto:
        """Return the DataProto that verl's `AgentLoopWorker._compute_score` makes."""
        rows = len(self.prompts)
        whole = [_tokens([*a, *b]) for a, b in zip(self.prompts, self.responses, strict=True)]
        tensors = {
            "prompts": _padded([_tokens(one) for one in self.prompts]),
            "responses": _padded([_tokens(one) for one in self.responses]),
            "attention_mask": _padded([torch.ones_like(one) for one in whole]),
            "input_ids": _padded(whole),
            "position_ids": _padded([torch.arange(len(one)) for one in whole]),
        }
        others = {
            **{name: np.array([value] * rows) for name, value in self.row.items()},
            "__num_turns__": np.array(self.num_turns),
            "tool_extra_fields": np.array(self.extra_fields, dtype=object),
            "prompt_len": np.array([len(one) for one in self.prompts]),
            "response_len": np.array([len(one) for one in self.responses]),
        }
        return DataProto(batch=TensorDict(tensors, batch_size=rows), non_tensor_batch=others)


def _tokens(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def _padded(rows: list[torch.Tensor]) -> torch.Tensor:
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)


class PlainRewardLoopWorker(RewardLoopWorker):  # type: ignore[misc]
    """verl's reward worker with a call for plain data; a reward function's `exit()` does not end it."""

    _scorer: Scorer | None = None

    def _init_reward_fn(self) -> None:
        super()._init_reward_fn()
        self._direct = DirectCalls(compute_plain=self.compute_plain)
        if callable(getattr(self.reward_manager, "compute_score", None)):
            self.reward_manager.compute_score = only_errors(self.reward_manager.compute_score)
        reward = self.config.reward
        by_model = reward.custom_reward_function.path is None and reward.reward_model.enable
        manager = self.reward_manager
        if isinstance(manager, VisualRewardManager):
            self._scorer = manager.score
        else:
            self._scorer = None if by_model else scorer_of(manager)

    async def compute_plain(self, answer: Plain | Response) -> dict[str, Any]:
        """Score one response, as verl's `compute_score` does."""
        if self._scorer is not None and isinstance(answer, Response) and len(answer.responses) == 1:
            return await self._scorer(answer)
        result: dict[str, Any] = await self.compute_score(answer.data())
        return result

    async def direct_address(self) -> Address:
        """Return where agent loop workers of this host send responses without Ray."""
        return await self._direct.address()


class PlainCaller:
    """A handle of a reward worker with the interface that verl's agent loop expects."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._direct = worker, DirectCaller(worker)

    @property
    def compute_score(self) -> PlainCaller:
        """This object, because verl calls `compute_score.remote(data)`."""
        return self

    def remote(self, data: DataProto) -> Awaitable[dict[str, Any]]:
        """Request the score of one response."""
        return self.score(Plain.of(data))

    async def score(self, answer: Plain | Response) -> dict[str, Any]:
        """Return the score of one response."""
        try:
            result: dict[str, Any] = await self._direct.call("compute_plain", answer)
        except ConnectionLost:
            # Ray waits until the worker has been started again.
            result = await self._worker.compute_plain.remote(answer)
        return result
