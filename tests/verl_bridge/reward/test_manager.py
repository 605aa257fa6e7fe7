# SPDX-License-Identifier: Apache-2.0
"""verl's reward manager with a reward function that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipe.async_pipeline.config.derived.runtime import RuntimeConfig
from recipe.async_pipeline.config.paths import OWN, RUNTIME, nested
from recipe.async_pipeline.config.placement import Placement
from recipe.async_pipeline.errors import RewardError
from tests import FAKES, HANG_S
from tests.conftest import Load

pytestmark = pytest.mark.real_engine

FUNCTIONS = str(FAKES / "reward_functions.py")
Make = Callable[..., Any]


@pytest.fixture
def manager(load: Load) -> Iterator[Make]:
    made: list[Any] = []

    def make(on_failure: str) -> Any:
        own = {
            "reward": {
                "timeout_s": HANG_S,
                "attempts": 1,
                "concurrency": 1,
                "failure": on_failure,
                "default": -1.0,
            }
        }
        runtime = RuntimeConfig(
            run="r",
            identity={},
            epoch=1,
            run_dir=Path("run"),
            run_dir_mark=None,
            resume_from=None,
            started_unix=0.0,
            placement=Placement(()),
            old_logp="trainer",
            reward_manager={"source": "register", "name": "naive"},
        )
        config = OmegaConf.create(
            {
                **nested({OWN: own, RUNTIME: runtime.plain()}),
                "reward": {
                    "custom_reward_function": {
                        "path": FUNCTIONS,
                        "name": "one",
                        "reward_kwargs": {"bonus": 0.5},
                    }
                },
            }
        )
        tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(chr(int(i)) for i in ids))
        made.append(
            load("recipe.async_pipeline.verl_bridge.reward.manager").GuardedRewardManager(
                config, tokenizer, None
            )
        )
        return made[-1]

    yield make
    for one in made:
        one._guard.close()


def responses(load: Load, *texts: str) -> list[Any]:
    """Return responses as verl's agent loop passes them."""
    found = []
    for text in texts:
        ids = torch.tensor([[ord(letter) for letter in text]])
        others = {"data_source": "toy", "reward_model": {"ground_truth": "46"}, "extra_info": {}}
        found.append(
            load("verl").DataProto.from_single_dict(
                {
                    "responses": ids,
                    "attention_mask": torch.ones_like(ids),
                    **{k: np.array([v], dtype=object) for k, v in others.items()},
                }
            )
        )
    return found


def score(make: Make, on_failure: str, data: list[Any]) -> list[Any]:
    async def run() -> list[Any]:
        manager = make(on_failure)  # verl uses the loop that runs when the manager is created
        return [await manager.run_single(one) for one in data]

    return asyncio.run(run())


def test_scores_have_the_format_of_verl(load: Load, manager: Make) -> None:
    right, wrong = score(manager, "fail", responses(load, "46", "47"))
    assert right == {"reward_score": 1.5, "reward_extra_info": {"acc": 1.5, "unscored": ""}}
    assert wrong["reward_score"] == 0.5


@pytest.mark.parametrize("on_failure", ["drop", "score"])
def test_a_response_without_a_score_is_marked_and_has_the_same_keys(
    load: Load, manager: Make, on_failure: str
) -> None:
    good, bad = score(manager, on_failure, responses(load, "dict", "raise"))
    assert bad["reward_score"] == -1.0
    assert bad["reward_extra_info"].keys() == good["reward_extra_info"].keys() == {"score", "acc", "unscored"}
    assert bad["reward_extra_info"]["unscored"].startswith("raised: one: ValueError")


def test_a_response_without_a_score_raises_if_failures_end_the_run(load: Load, manager: Make) -> None:
    with pytest.raises(RewardError, match="raised: one: ValueError: no such rule"):
        score(manager, "fail", responses(load, "raise"))
