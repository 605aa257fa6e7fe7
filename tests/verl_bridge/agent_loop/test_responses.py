# SPDX-License-Identifier: Apache-2.0
"""A stored response becomes a trajectory, whose versions must be known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.agents.episodes import EndPolicies, EpisodeRules
from recipe.async_pipeline.core.groups.items import Trajectory, plain
from recipe.async_pipeline.errors import RolloutError
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import Attempt, EpisodeLimits
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.redundancy import Begun
from recipe.async_pipeline.verl_bridge.agent_loop.responses import (
    ResponseSample,
    finished_group,
    trajectory_of,
)
from recipe.async_pipeline.verl_bridge.agent_loop.tokens.partial_rollouts import Transcript
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
        spans=plain(((1, 0), (2, 2))),
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


def sample(key: str, *, cost_s: float, **more: Any) -> ResponseSample:
    fields = {"extra_fields": {"reward_extra_info": {"acc": cost_s}}}
    return ResponseSample(
        trajectory_of(key, fields, TAG, ATTEMPT), fields, "train", {"score_s": cost_s}, **more
    )


def test_a_group_has_its_trajectories_by_key_and_the_sums_over_its_episodes() -> None:
    samples = [
        sample("a_1_0", cost_s=1.0, times=[[0.0, 9.0]], took_ms=[1.5]),
        sample("a_0_0", cost_s=2.0, times=[[0.0, 1.0], [9.0, 1.0]], counts={"left_behind": 1}, took_ms=[2.5]),
        sample("a_2_0", cost_s=3.0, counts={"retokenized": 0}),
    ]
    prompt = {"uid": "a", "global_steps": 7}
    episodes = [Begun(Transcript()), Begun(Transcript()), Begun()]
    for episode, replayed in zip(episodes, (2, 1), strict=False):
        assert episode.transcript is not None
        episode.transcript.replayed = replayed
    group, facts = finished_group(prompt, samples, [], [], episodes)
    assert (group.uid, group.step, group.redundant) == ("a", 7, 0)
    assert [one.key for one in group.trajectories] == ["a_0_0", "a_1_0", "a_2_0"]
    assert group.counts == {"left_behind": 1, "retokenized": 0, "replayed_requests": 3}
    assert (group.took_ms, group.payload) == ((1.5, 2.5), [["extra_fields"]])
    assert [info["acc"] for info in facts.reward_infos] == [2.0, 1.0, 3.0], "in the order of the trajectories"
    assert facts.costs["score_s"] == [1.0, 2.0, 3.0], "in the order in which they finished"
    assert facts.costs["slowest_turns"] == [[0.0, 1.0], [9.0, 1.0]]


def test_a_group_of_single_turns_has_no_turns_and_no_replays() -> None:
    samples = [sample("a_0_0", cost_s=1.0), sample("a_1_0", cost_s=1.0)]
    samples[1].fields["image"] = 1
    group, facts = finished_group({"uid": "a", "global_steps": 7}, samples, [], [], [Begun(), Begun()])
    assert group.counts == {} and "slowest_turns" not in facts.costs
    assert group.payload == [["extra_fields"], ["extra_fields", "image"]], "columns that differ are all named"
