# SPDX-License-Identifier: Apache-2.0
"""A response on its way to a reward worker, as lists of numbers or arrays, and how it is scored there."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from ...errors import RewardError
from ..rollout.diffusers.fields import PICTURE


class PlainData(NamedTuple):
    """A DataProto as arrays, without `meta_info`; all dtypes must exist in numpy."""

    tensors: Mapping[str, np.ndarray[Any, Any]]
    others: Mapping[str, np.ndarray[Any, Any]]

    @classmethod
    def of(cls, data: DataProto) -> PlainData:
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


SHORT = 1024
"""Tokens that are decoded on the event loop, in less time than a thread takes to start."""
Scorer = Callable[[Response], Awaitable[dict[str, Any]]]


def scorer_of(manager: Any) -> Scorer | None:
    """Return a replacement for `manager.run_single`, or None if the manager is not verl's `naive`.

    The manager takes its arguments out of a DataProto of one row. To make it, slice it and index it takes
    three times as long as a short reward function and its thread.
    """
    return partial(_score, manager) if type(manager) is NaiveRewardManager else None


async def _score(manager: Any, response: Response) -> dict[str, Any]:
    """Return what `manager.run_single(response.data())` returns, for a response with one output."""
    (ids,), arguments = response.responses, arguments_of(response)
    if manager.reward_router_address is not None:
        arguments["reward_router_address"] = manager.reward_router_address
        arguments["reward_model_tokenizer"] = manager.reward_model_tokenizer
    decode = partial(manager.tokenizer.decode, ids, skip_special_tokens=True)

    def decode_and_score() -> Any:
        return manager.compute_score(solution_str=decode(), **arguments)

    loop = asyncio.get_running_loop()
    if manager.is_async_reward_score:
        text = decode() if len(ids) <= SHORT else await loop.run_in_executor(None, decode)
        result = await manager.compute_score(solution_str=text, **arguments)
    else:
        result = await loop.run_in_executor(None, decode_and_score)

    return result_of(result)


def result_of(result: Any) -> dict[str, Any]:
    """Return what a reward function returned as verl's reward managers do."""
    if isinstance(result, dict):
        return {"reward_score": result["score"], "reward_extra_info": dict(result)}
    return {"reward_score": result, "reward_extra_info": {"acc": result}}


def arguments_of(response: Response) -> dict[str, Any]:
    """Return the arguments of a reward function besides the text."""
    row = response.row
    extra_info = _item(row["extra_info"]) if "extra_info" in row else {}
    extra_info.update(response.extra_fields[0].items())
    extra_info["num_turns"] = _item(response.num_turns[0])
    extra_info["rollout_reward_scores"] = _item(row["reward_scores"]) if "reward_scores" in row else {}
    return {
        "data_source": _item(row["data_source"]),
        "ground_truth": _item(row["reward_model"])["ground_truth"],
        "extra_info": extra_info,
    }


def _item(value: Any) -> Any:
    """Return a value as a DataProto returns it: strings and numbers have numpy's types."""
    return np.array([value])[0]


class VisualRewardManager(RewardManagerBase):  # type: ignore[misc]
    """Scores images: the reward function gets the picture, uint8 (3, height, width), as `solution_image`.

    compute_score(data_source, solution_image, ground_truth, extra_info) -> a number, or a dict with `score`

    verl loads the class by this module's name.
    """

    def __init__(
        self, config: DictConfig, tokenizer: Any, compute_score: Callable[..., Any], **models: Any
    ) -> None:
        """`models`: of a reward model that serves text, which images do not have."""
        super().__init__(config, tokenizer, compute_score)
        self.compute_score = compute_score
        self._is_async = inspect.iscoroutinefunction(compute_score)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Score one response, a DataProto as verl's agent loop passes it."""
        row = data[-1:][0].non_tensor_batch
        fields = dict(row.get("tool_extra_fields") or {})
        picture = fields.pop(PICTURE, None)
        return await self._scored(
            picture,
            {
                "data_source": row["data_source"],
                "ground_truth": row["reward_model"]["ground_truth"],
                "extra_info": {**(row.get("extra_info") or {}), **fields},
            },
        )

    async def score(self, response: Response) -> dict[str, Any]:
        """Score one response with one output."""
        picture = response.extra_fields[0].get(PICTURE)
        arguments = arguments_of(response)
        arguments["extra_info"].pop(PICTURE, None)
        return await self._scored(picture, arguments)

    async def _scored(self, picture: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RewardError if there is no picture."""
        if picture is None:
            raise RewardError("invalid: a response without a picture cannot be scored as an image")
        call = partial(self.compute_score, solution_image=picture, **arguments)
        loop = asyncio.get_running_loop()
        return result_of(await call() if self._is_async else await loop.run_in_executor(None, call))
