# SPDX-License-Identifier: Apache-2.0
"""Score images: the reward function gets the picture, uint8 (3, height, width), as `solution_image`.

    compute_score(data_source, solution_image, ground_truth, extra_info) -> a number, or a dict with `score`

verl loads the class by this module's name.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from ...errors import RewardError
from ..rollout.diffusers.fields import PICTURE
from .naive_scoring import arguments_of, result_of
from .responses import Response


class VisualRewardManager(RewardManagerBase):  # type: ignore[misc]
    """Calls the configured function with the picture of a response."""

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
