# SPDX-License-Identifier: Apache-2.0
"""Guard the reward function that verl's reward managers call. verl loads the class by this module's name."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.reward import resolve_reward_manager_cls

from ...core.groups.scores import Score, ScoreRule
from ...errors import RewardError
from ..launch.run_config import knobs_of, runtime_of
from .executor import FunctionLocation, Limits, RewardGuard


class GuardedRewardManager(RewardManagerBase):  # type: ignore[misc]
    """Runs the configured manager with a guarded reward function, and marks responses without a score."""

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Any, **more: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        knobs = knobs_of(config).reward
        assert knobs.timeout_s is not None, "without a limit verl's own manager is used"
        described = config.reward.custom_reward_function
        kwargs = (
            OmegaConf.to_container(described.get("reward_kwargs") or {}, resolve=True)
            if described.get("reward_kwargs")
            else {}
        )

        assert isinstance(kwargs, dict)
        self._guard = RewardGuard(
            FunctionLocation(
                str(described.path), str(described.name), {str(k): v for k, v in kwargs.items()}
            ),
            Limits(
                timeout_s=knobs.timeout_s,
                attempts=knobs.attempts,
                concurrency=knobs.concurrency,
                batch=knobs.batch,
                memory_mb=knobs.memory_mb,
            ),
        )

        self._rule = ScoreRule(knobs.failure, knobs.default, names=["acc"])
        inner = resolve_reward_manager_cls(
            OmegaConf.create({"reward": {"reward_manager": runtime_of(config).reward_manager}})
        )
        self._inner = inner(config=config, tokenizer=tokenizer, compute_score=self._score, **more)

    async def _score(self, **answer: Any) -> Any:
        return await self._guard.score(**answer)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return `{reward_score, reward_extra_info}` of one response.

        Raises RewardError if there is no score and such a failure should end the run.
        """
        try:
            result: dict[str, Any] = await self._inner.run_single(data)
            score, info = Score.of(result["reward_score"]), result["reward_extra_info"]
        except RewardError as error:
            if self._rule.ends_run:
                raise
            result, score, info = {}, Score(None, str(error)), {}
        # Validation needs a number even for a response that training would drop.
        number, info = self._rule.row(score, info)
        return {**result, "reward_score": number, "reward_extra_info": info}
