# SPDX-License-Identifier: Apache-2.0
"""Restart verl's reward workers when their processes end."""

from __future__ import annotations

from verl.experimental.reward_loop.reward_loop import RewardLoopManager

from ..calls.restartable_actors import restartable
from .worker import PlainRewardLoopWorker


class PipelineRewardLoopManager(RewardLoopManager):  # type: ignore[misc]
    """verl's reward manager of workers, which restarts a worker whose process ends."""

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers_class = restartable(PlainRewardLoopWorker)
        super()._init_reward_loop_workers()
