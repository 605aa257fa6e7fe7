# SPDX-License-Identifier: Apache-2.0
"""Advantages that verl lacks: two estimators in its registry, and for sessions whose last row is masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import AdvantageEstimator, register_adv_est
from verl.trainer.ppo.v1 import utils

from ....config.checks.rollout_correction import FLOW, PROCESS

EPSILON = 1e-4
MOST = 5.0
"""Largest absolute advantage."""
SMALL = 1e-6
"""Added to a deviation, as in verl's `grpo`."""
MASK, RESULTS = "response_mask", ("advantages", "returns")


@register_adv_est(FLOW)
def flow_grpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Any], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, (samples, steps): equal for all steps of a sample.

    The implementations of Flow-GRPO divide by the deviation of all rewards of a step by default, so that a
    prompt whose samples are nearly equal does not weigh as much as others, and cut advantages off (arXiv
    2505.05470 and its code). verl's `grpo` divides by the deviation of each prompt's samples.

    `index` names the prompt of each sample; a prompt with one sample has the advantage of its reward.
    """
    rewards = token_level_rewards.sum(dim=-1)
    prompts: dict[Any, list[int]] = {}
    for row, prompt in enumerate(index):
        prompts.setdefault(prompt, []).append(row)

    centred = rewards.clone()
    for rows in prompts.values():
        if len(rows) > 1:
            centred[rows] -= rewards[rows].mean()
    spread = rewards.std() if len(rewards) > 1 else rewards.new_ones(())
    advantages = (centred / (spread + EPSILON)).clamp(-MOST, MOST).unsqueeze(-1) * response_mask
    return advantages, advantages


@register_adv_est(PROCESS)
def grpo_process_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Any],
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, (samples, tokens): of a token, the sum of the normalized rewards of its
    turn and of the later ones.

    GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3), where a step is a turn of
    the policy: rewards are normalized with the mean and the deviation of the rewards of all turns of a
    prompt's samples, or with the mean alone if `norm_adv_by_std_in_grpo` is False. A turn ends where
    `response_mask` does, and at a token with a reward, if its tokens are masked. `index` names the prompts.
    """
    mask = response_mask.bool()
    follows = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    ends = (mask & ~follows) | (token_level_rewards != 0)
    prompts: dict[Any, list[int]] = {}
    for row, prompt in enumerate(index):
        prompts.setdefault(prompt, []).append(row)

    rewards = torch.zeros_like(token_level_rewards)
    by_deviation = getattr(config, "norm_adv_by_std_in_grpo", True)
    for rows in prompts.values():
        of_prompt, at = token_level_rewards[rows], ends[rows]
        values = of_prompt[at]
        if len(values) > 1:
            spread = values.std() + SMALL if by_deviation else 1.0
            of_prompt = (of_prompt - values.mean()) / spread
        rewards[rows] = of_prompt * at
    advantages = rewards.flip(-1).cumsum(-1).flip(-1) * response_mask
    return advantages, advantages


def session_advantages(data: Any, batch_keys: Sequence[str], adv_estimator: Any, **options: Any) -> Any:
    """Return what verl's `compute_advantage_for_multi_trajectories` returns, for all rows of a session.

    With GRPO, verl computes the advantage of a session from the score of its last row, reads it at the first
    token of that row that is trained, and gives it to the other rows. If the tokens of the last row are
    masked, because they are too old (`mask_stale_tokens`) or were rejected, verl reads a zero there. So rows
    without a trained token get one while verl computes.
    """
    mask = data.batch[MASK]
    lost = mask.sum(-1) == 0
    stock = utils.compute_advantage_for_multi_trajectories
    if adv_estimator != AdvantageEstimator.GRPO or not lost.any():
        return stock(data, batch_keys, adv_estimator, **options)

    lent = mask.clone()
    lent[lost, 0] = 1
    data.batch[MASK] = lent
    try:
        done = stock(data, batch_keys, adv_estimator, **options)
    finally:
        data.batch[MASK] = mask

    done.batch[MASK] = mask
    for name in RESULTS:
        done.batch[name] = done.batch[name] * mask
    return done
