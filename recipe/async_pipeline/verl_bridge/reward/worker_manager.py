# SPDX-License-Identifier: Apache-2.0
"""verl's reward workers, outliving their processes."""

from __future__ import annotations

from verl.experimental.reward_loop.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1 import trainer_base

from ..restartable_actors import restartable
from .worker import PlainRewardLoopWorker


class PipelineRewardLoopManager(RewardLoopManager):  # type: ignore[misc]
    """verl's. A worker whose process ends is started again."""

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers_class = restartable(PlainRewardLoopWorker)
        super()._init_reward_loop_workers()


def use_ours() -> None:
    """verl's trainer makes its manager by this name, and offers nothing else to choose it by."""
    trainer_base.RewardLoopManager = PipelineRewardLoopManager
