# SPDX-License-Identifier: Apache-2.0
"""Advantages of `flow_grpo`: a prompt's mean, the whole batch's deviation, and a cut."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.real_engine


def advantages(module: ModuleType, rewards: list[float], prompts: list[str], steps: int = 2) -> torch.Tensor:
    """Through verl's registry, as its trainer calls it: the reward is on the last token."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    table = torch.zeros(len(rewards), steps)
    table[:, -1] = torch.tensor(rewards)
    mask = torch.ones(len(rewards), steps)
    found, returns = get_adv_estimator_fn(module.NAME)(
        token_level_rewards=table, response_mask=mask, index=prompts, config=None
    )
    assert torch.equal(found, returns)
    return found


def test_the_deviation_is_that_of_all_rewards(module: ModuleType) -> None:
    rewards, prompts = [1.0, 0.0, 0.6, 0.5], ["a", "a", "b", "b"]
    found = advantages(module, rewards, prompts)
    spread = float(torch.tensor(rewards).std()) + 1e-4
    wanted = torch.tensor([0.5, -0.5, 0.05, -0.05]) / spread
    torch.testing.assert_close(found, wanted.unsqueeze(1).expand(4, 2))


def test_a_rare_success_is_cut_off(module: ModuleType) -> None:
    found = advantages(module, [1.0] + [0.0] * 99, ["a"] * 100)
    assert float(found.max()) == module.MOST


def test_steps_that_are_masked_have_none(module: ModuleType) -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    found, _ = module.flow_grpo_advantage(rewards, mask, ["a", "a"])
    assert found[0, 1] == 0 and found[0, 0] > 0 > found[1, 1] == found[1, 0]


def test_a_single_sample_keeps_its_reward(module: ModuleType) -> None:
    found = advantages(module, [0.5], ["a"])
    torch.testing.assert_close(found, torch.full((1, 2), 0.5), rtol=1e-3, atol=0)
