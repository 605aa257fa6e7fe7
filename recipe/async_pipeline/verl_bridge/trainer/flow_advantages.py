# SPDX-License-Identifier: Apache-2.0
"""The advantage `flow_grpo` in verl's registry: GRPO with one standard deviation for the whole batch.

The implementations of Flow-GRPO divide by the deviation of all rewards of a step by default, so that a prompt
whose samples are nearly equal does not weigh as much as others, and cut advantages off (arXiv 2505.05470 and
its code). verl's `grpo` divides by the deviation of each prompt's samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

NAME = "flow_grpo"
EPSILON = 1e-4
MOST = 5.0
"""Largest absolute advantage."""


@register_adv_est(NAME)
def flow_grpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Any], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, (samples, steps): equal for all steps of a sample.

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
