# SPDX-License-Identifier: Apache-2.0
"""Score responses as verl's reward manager `naive` does, without tensors and with one thread instead of two.

The manager takes its arguments out of a DataProto of one row. To make it, slice it and index it takes three
times as long as a short reward function and its thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from .responses import Response

SHORT = 1024
"""Tokens that are decoded on the event loop, in less time than a thread takes to start."""
Scorer = Callable[[Response], Awaitable[dict[str, Any]]]


def scorer_of(manager: Any) -> Scorer | None:
    """Return a replacement for `manager.run_single`, or None if the manager is not verl's `naive`."""
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
