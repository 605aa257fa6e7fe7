# SPDX-License-Identifier: Apache-2.0
"""verl's reward workers, outliving their processes."""

from __future__ import annotations

from typing import Any

import ray
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.trainer.ppo.v1 import trainer_base

RESTARTS = 10
"""Of one worker in a run. Ray starts the process again, and asks it again for what it had not answered."""


class LastingArguments:
    """An actor class whose constructor's arguments stay where Ray finds them when it starts an actor again.

    Those that Ray puts into its object store by itself are gone once an actor has started.
    """

    def __init__(self, actor_class: Any) -> None:
        self._actor_class = actor_class
        self._kept: list[tuple[Any, ray.ObjectRef[Any]]] = []

    def options(self, **options: Any) -> LastingArguments:
        """Of the actors that are made from what this returns."""
        other = LastingArguments(self._actor_class.options(**options))
        other._kept = self._kept
        return other

    def remote(self, *args: Any) -> Any:
        return self._actor_class.remote(*[self._lasting(arg) for arg in args])

    def _lasting(self, arg: Any) -> ray.ObjectRef[Any]:
        found = next((ref for kept, ref in self._kept if kept is arg), None)
        if found is None:
            found = ray.put(arg)
            self._kept.append((arg, found))
        return found


class PipelineRewardLoopManager(RewardLoopManager):  # type: ignore[misc]
    """verl's. A worker whose process ends is started again."""

    def _init_reward_loop_workers(self) -> None:
        lasting = ray.remote(max_restarts=RESTARTS, max_task_retries=RESTARTS)(RewardLoopWorker)
        self.reward_loop_workers_class = LastingArguments(lasting)
        super()._init_reward_loop_workers()


def use_ours() -> None:
    """verl's trainer makes its manager by this name, and offers nothing else to choose it by."""
    trainer_base.RewardLoopManager = PipelineRewardLoopManager
