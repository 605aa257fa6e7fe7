# SPDX-License-Identifier: Apache-2.0
"""Where verl has no reward function, a run knows it without a score."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

pytestmark = pytest.mark.real_engine


DEFAULT: dict[str, Any] = {
    "custom_reward_function": {"path": None},
    "reward_model": {"enable": False},
    "reward_manager": {"name": "naive", "module": {"path": None}},
}


@pytest.mark.parametrize(
    ("data_source", "known"),
    [("openai/gsm8k", True), ("math_dapo", True), ("async_pipeline/frozen_lake", False), (None, False)],
)
def test_verls_function_knows_few_data_sources(
    module: ModuleType, data_source: str | None, known: bool
) -> None:
    assert module.can_score(OmegaConf.create({"reward": DEFAULT}), data_source) is known


@pytest.mark.parametrize(
    "own",
    [
        {"custom_reward_function": {"path": "score.py"}},
        {"reward_model": {"enable": True}},
        {"reward_manager": {"module": {"path": "manager.py"}}},
    ],
)
def test_a_function_or_model_of_the_run_scores_anything(module: ModuleType, own: dict[str, Any]) -> None:
    assert module.can_score(OmegaConf.create({"reward": {**DEFAULT, **own}}), "of_no_benchmark")
