# SPDX-License-Identifier: Apache-2.0
"""What verl lacks: advantages of `flow_grpo`, and sessions whose last row has no trained token."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.real_engine


def flow_advantages(
    module: ModuleType, rewards: list[float], prompts: list[str], steps: int = 2
) -> torch.Tensor:
    """Through verl's registry, as its trainer calls it: the reward is on the last token."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    table = torch.zeros(len(rewards), steps)
    table[:, -1] = torch.tensor(rewards)
    mask = torch.ones(len(rewards), steps)
    found, returns = get_adv_estimator_fn(module.FLOW)(
        token_level_rewards=table, response_mask=mask, index=prompts, config=None
    )
    assert torch.equal(found, returns)
    return found


def test_the_deviation_is_that_of_all_rewards(module: ModuleType) -> None:
    rewards, prompts = [1.0, 0.0, 0.6, 0.5], ["a", "a", "b", "b"]
    found = flow_advantages(module, rewards, prompts)
    spread = float(torch.tensor(rewards).std()) + 1e-4
    wanted = torch.tensor([0.5, -0.5, 0.05, -0.05]) / spread
    torch.testing.assert_close(found, wanted.unsqueeze(1).expand(4, 2))


def test_a_rare_success_is_cut_off(module: ModuleType) -> None:
    found = flow_advantages(module, [1.0] + [0.0] * 99, ["a"] * 100)
    assert float(found.max()) == module.MOST


def process_advantages(
    module: ModuleType, rewards: list[list[float]], mask: list[list[int]], prompts: list[str], **options: Any
) -> torch.Tensor:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    found, returns = get_adv_estimator_fn(module.PROCESS)(
        token_level_rewards=torch.tensor(rewards),
        response_mask=torch.tensor(mask),
        index=prompts,
        config=AlgoConfig(adv_estimator=module.PROCESS, **options),
    )
    assert torch.equal(found, returns)
    assert isinstance(found, torch.Tensor)
    return found


def test_a_turn_is_credited_with_its_reward_and_the_later_ones(module: ModuleType) -> None:
    # Two turns with a tool between them; one turn; another prompt with one turn.
    rewards = [[0.0, 1.0, 0.0, 0.0, -1.0], [0.0, 0.0, 3.0, 0.0, 0.0], [0.0, 5.0, 0.0, 0.0, 0.0]]
    mask = [[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    turns = torch.tensor([1.0, -1.0, 3.0])
    for by_deviation in (True, False):
        found = process_advantages(
            module, rewards, mask, ["a", "a", "b"], norm_adv_by_std_in_grpo=by_deviation
        )
        first, last, other = (turns - turns.mean()) / (turns.std() + 1e-6 if by_deviation else 1.0)
        wanted = torch.zeros(3, 5)
        wanted[0, :2], wanted[0, 3:], wanted[1, :3] = first + last, last, other
        wanted[2, :2] = 5.0  # as verl's grpo: the only one of its prompt is not normalized
        torch.testing.assert_close(found, wanted)


def test_a_turn_without_a_reward_counts_and_a_masked_one_too(module: ModuleType) -> None:
    # The first turn of the first row is too old to be trained; the second one has no reward.
    rewards = [[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    mask = [[0, 0, 0, 1], [0, 0, 1, 1]]
    turns = torch.tensor([2.0, 0.0, 1.0])
    _, none, one = (turns - turns.mean()) / (turns.std() + 1e-6)
    found = process_advantages(module, rewards, mask, ["a", "a"])
    torch.testing.assert_close(
        found, torch.tensor([[0.0, 0.0, 0.0, float(none)], [0.0, 0.0, float(one), float(one)]])
    )


def test_with_one_turn_each_it_is_grpo(module: ModuleType) -> None:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rewards = torch.zeros(6, 3)
    rewards[:, 2] = torch.randn(6, generator=torch.Generator().manual_seed(0))
    prompts = ["a"] * 4 + ["b"] * 2
    stock, _ = compute_grpo_outcome_advantage(rewards, torch.ones(6, 3), prompts)
    found = process_advantages(module, rewards.tolist(), [[1] * 3] * 6, prompts)
    torch.testing.assert_close(found, stock)


def test_steps_that_are_masked_have_none(module: ModuleType) -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    found, _ = module.flow_grpo_advantage(rewards, mask, ["a", "a"])
    assert found[0, 1] == 0 and found[0, 0] > 0 > found[1, 1] == found[1, 0]


def test_a_single_sample_keeps_its_reward(module: ModuleType) -> None:
    found = flow_advantages(module, [0.5], ["a"])
    torch.testing.assert_close(found, torch.full((1, 2), 0.5), rtol=1e-3, atol=0)


KEYS = ["p_0_0", "p_0_1", "p_1_0", "p_2_0", "p_2_1", "p_2_2"]
REWARDS = [0.0, 1.0, 0.25, 0.0, 0.0, -1.0]
"""Of the rows; the last one of each session has the session's."""
MASKS = [[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 1], [1, 1, 1]]


def computed(module: ModuleType, masks: list[list[int]], estimator: str = "grpo") -> Any:
    import numpy as np
    from verl import DataProto

    rewards = torch.zeros(len(KEYS), 3)
    rewards[:, -1] = torch.tensor(REWARDS)
    data = DataProto.from_dict(
        tensors={"response_mask": torch.tensor(masks), "token_level_rewards": rewards},
        non_tensors={"uid": np.array(["p"] * len(KEYS), dtype=object)},
    )
    done = module.session_advantages(
        data,
        batch_keys=KEYS,
        adv_estimator=module.AdvantageEstimator(estimator),
        num_repeat=3,
        norm_adv_by_std_in_grpo=True,
        config=None,
    )
    assert done.batch["response_mask"].tolist() == masks, "what is trained stays as it was"
    return done.batch


@pytest.mark.parametrize("lost", [[1], [5], [1, 5], [1, 2, 5], [4], [0, 1]])
def test_rows_keep_the_advantage_of_their_session_if_its_last_row_is_masked(
    module: ModuleType, lost: list[int]
) -> None:
    whole = computed(module, MASKS)
    masks = [[0, 0, 0] if row in lost else mask for row, mask in enumerate(MASKS)]
    found = computed(module, masks)
    for name in ("advantages", "returns"):
        torch.testing.assert_close(found[name], whole[name] * torch.tensor(masks))
    assert whole["advantages"][0].abs().max() > 0.5, "the session has an advantage"


def test_without_a_masked_row_and_for_other_estimators_it_is_verls(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def stock(data: Any, batch_keys: list[str], estimator: Any, **options: Any) -> Any:
        seen.append((estimator, sorted(options)))
        return data

    monkeypatch.setattr(module.utils, "compute_advantage_for_multi_trajectories", stock)
    options = ["config", "norm_adv_by_std_in_grpo", "num_repeat"]
    computed(module, MASKS)
    computed(module, [[0, 0, 0], *MASKS[1:]], "rloo")
    assert seen == [("grpo", options), ("rloo", options)]
