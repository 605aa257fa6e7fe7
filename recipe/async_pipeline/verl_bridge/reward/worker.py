# SPDX-License-Identifier: Apache-2.0
"""Send responses to reward workers as lists of numbers.

verl makes a DataProto of each response and pickles it, with tensors in torch's file format. For short
responses that is half of the time of an agent loop worker. Lists take a small part of that time; the reward
worker makes the DataProto. Responses with images are sent as arrays of the DataProto that verl made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker

from ..calls.direct_calls import Address, ConnectionLost, DirectCaller, DirectCalls
from ..calls.ray_calls import restartable, say_if_restarted
from .executor import only_errors
from .plain_results import plain_result
from .responses import PlainData, Response, Scorer, VisualRewardManager, scorer_of


class PlainRewardLoopWorker(RewardLoopWorker):  # type: ignore[misc]
    """verl's reward worker with a call for plain data; a reward function's `exit()` does not end it."""

    _scorer: Scorer | None = None

    def _init_reward_fn(self) -> None:
        say_if_restarted()
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

    async def compute_plain(self, answer: PlainData | Response) -> dict[str, Any]:
        """Score one response, as verl's `compute_score` does."""
        if self._scorer is not None and isinstance(answer, Response) and len(answer.responses) == 1:
            return _plain(await self._scorer(answer))
        return await self.compute_score(answer.data())

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """Score one response as verl does, with a result that other processes can read."""
        return _plain(await super().compute_score(data))

    async def direct_address(self) -> Address:
        """Return where agent loop workers of this host send responses without Ray."""
        return await self._direct.address()


def _plain(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain_result(value) for name, value in result.items()}


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
        return self.score(PlainData.of(data))

    async def score(self, answer: PlainData | Response) -> dict[str, Any]:
        """Return the score of one response."""
        try:
            result: dict[str, Any] = await self._direct.call("compute_plain", answer)
        except ConnectionLost:
            # Ray waits until the worker has been started again.
            result = await self._worker.compute_plain.remote(answer)
        return result


class PipelineRewardLoopManager(RewardLoopManager):  # type: ignore[misc]
    """verl's reward manager of workers, which restarts a worker whose process ends."""

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers_class = restartable(PlainRewardLoopWorker)
        super()._init_reward_loop_workers()
