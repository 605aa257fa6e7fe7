# SPDX-License-Identifier: Apache-2.0
"""A stored response becomes a trajectory, whose versions must be known."""

from __future__ import annotations

import numpy as np
import pytest

from recipe.async_pipeline.agents.episodes import EndPolicies, EpisodeRules
from recipe.async_pipeline.core.groups.items import Trajectory
from recipe.async_pipeline.core.lag.token_spans import spans_of
from recipe.async_pipeline.errors import RolloutError
from recipe.async_pipeline.verl_bridge.agent_loop.answers import ResponseSample, counted, trajectory_of
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import Attempt, EpisodeLimits
from recipe.async_pipeline.verl_bridge.agent_loop.tokens.version_spans import TURNS

TAG = {"response_len": 3, "min_global_steps": 1, "max_global_steps": 2}
ATTEMPT = Attempt(2, EpisodeLimits(EpisodeRules.of(2, EndPolicies())))
ATTEMPT.end = "turns"


def test_a_stored_response_becomes_a_trajectory() -> None:
    told = {"version_spans": [[1, 0], [2, 2]], TURNS: 3}
    fields = {"extra_fields": told, "num_turns": 6, "rm_scores": [0, 0, 0.5]}
    assert trajectory_of("a_0_0", fields, TAG, ATTEMPT, (1.5, 2.25)) == Trajectory(
        key="a_0_0",
        first_version=1,
        last_version=2,
        num_tokens=3,
        spans=spans_of(((1, 0), (2, 2))),
        turns=3,
        reward=0.5,
        model_s=1.5,
        env_s=2.25,
        end="turns",
        attempts=2,
        payload=TAG,
    )
    by_turn = trajectory_of(
        "a_0_0", {"rm_scores": np.array([0.5, 0.0, -0.25, 1.0], np.float32)}, TAG, ATTEMPT
    )
    assert by_turn.reward == 1.25, "rewards of turns add up"
    bare = trajectory_of("a_0_0", {}, TAG, ATTEMPT)
    assert (bare.spans, bare.turns, bare.reward, bare.model_s, bare.env_s) == (None,) * 5


@pytest.mark.parametrize("missing", ["min_global_steps", "max_global_steps"])
def test_a_response_of_an_unknown_version_is_refused(missing: str) -> None:
    with pytest.raises(RolloutError, match="trajectory a_0_0 came back without the version"):
        trajectory_of("a_0_0", {}, {**TAG, missing: None}, ATTEMPT)


def test_the_counts_of_a_group_are_the_sum_over_its_episodes() -> None:
    one = trajectory_of("a_0_0", {}, TAG, ATTEMPT)
    group = [
        ResponseSample(one, {}, "train", {}, (), counts)
        for counts in ({}, {"left_behind": 1}, {"retokenized": 0})
    ]
    assert counted(group, []) == {"left_behind": 1, "retokenized": 0}
    assert counted(group[:1], [0, 2, 1]) == {"replayed_requests": 3}
