# SPDX-License-Identifier: Apache-2.0
"""The advantage belongs to the session, and does not depend on which of its tokens are still trained."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.real_engine

KEYS = ["p_0_0", "p_0_1", "p_1_0", "p_2_0", "p_2_1", "p_2_2"]
REWARDS = [0.0, 1.0, 0.25, 0.0, 0.0, -1.0]
"""Of the rows; the last one of each session has the session's."""
MASKS = [[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 1], [1, 1, 1]]


def computed(module: ModuleType, masks: list[list[int]], estimator: str = "grpo") -> Any:
    import numpy as np
    import torch
    from verl import DataProto

    rewards = torch.zeros(len(KEYS), 3)
    rewards[:, -1] = torch.tensor(REWARDS)
    data = DataProto.from_dict(
        tensors={"response_mask": torch.tensor(masks), "token_level_rewards": rewards},
        non_tensors={"uid": np.array(["p"] * len(KEYS), dtype=object)},
    )
    done = module.advantages(
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
    import torch

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
