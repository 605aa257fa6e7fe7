# SPDX-License-Identifier: Apache-2.0
"""Responses differ in reward, except in the groups to be filtered."""

from __future__ import annotations

from recipe.async_pipeline.lab.bench.inputs.spread_reward import compute_score


def rewards(index: int, filtered: float) -> set[float]:
    """The rewards of eight different responses to one prompt."""
    return {
        compute_score("toy", f"response {i}", "46", {"index": index}, filtered=filtered) for i in range(8)
    }


def test_responses_to_one_prompt_differ() -> None:
    assert len(rewards(3, filtered=0.0)) == 8


def test_the_share_of_prompts_that_is_filtered() -> None:
    alike = sum(len(rewards(index, filtered=0.3)) == 1 for index in range(2000))
    assert abs(alike / 2000 - 0.3) < 0.03
