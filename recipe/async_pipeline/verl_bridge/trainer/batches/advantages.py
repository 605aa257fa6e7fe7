# SPDX-License-Identifier: Apache-2.0
"""Advantages that verl lacks: `flow_grpo` in its registry, and for sessions whose last row is masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import AdvantageEstimator, register_adv_est
from verl.trainer.ppo.v1 import utils

NAME = "flow_grpo"
EPSILON = 1e-4
MOST = 5.0
"""Largest absolute advantage."""
MASK, RESULTS = "response_mask", ("advantages", "returns")


@register_adv_est(NAME)
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
