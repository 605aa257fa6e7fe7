# SPDX-License-Identifier: Apache-2.0
"""The ends of an episode: every end, policy and attempt has one decision."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace

import pytest

from recipe.async_pipeline.agents.episodes import (
    BLAME,
    COUNTS,
    DONE,
    ENDS,
    FAILED_EPISODE,
    MAX_SOURCES,
    PEAKS,
    POLICIES,
    ROW_REASONS,
    EndPolicies,
    EpisodeRules,
    counted_together,
    explain_rows,
    last_responses,
    metrics_by_source,
    metrics_of,
)
from recipe.async_pipeline.core.groups.bad_data import POLICIES as KINDS
from recipe.async_pipeline.core.groups.items import Group, Trajectory, plain

CASES = [(end, policy) for end, policies in POLICIES.items() for policy in policies]


def test_the_table_is_whole() -> None:
    assert set(POLICIES) <= set(ENDS) == set(BLAME)
    assert FAILED_EPISODE in KINDS, "what is dropped is bad data of a known kind"
    defaults = dataclasses.asdict(EndPolicies())
    assert {end: policies[0] for end, policies in POLICIES.items()} == defaults


@pytest.mark.parametrize(("end", "policy"), CASES)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(("attempts", "attempt"), [*itertools.product((1, 2, 3), (1, 2, 3))])
def test_every_end_has_one_decision(
    end: str, policy: str, written: bool, attempts: int, attempt: int
) -> None:
    rules = EpisodeRules(attempts, {**dataclasses.asdict(EndPolicies()), end: policy})
    left = "again" if attempt < attempts else "drop"
    expected = {"again": left, "drop": "drop"}.get(policy, policy if written else left)
    assert rules.judge(end, attempt, written=written) == expected


def test_what_reached_its_own_end_is_trained() -> None:
    rules = EpisodeRules.of(2, EndPolicies(agent_failed="drop"))
    assert [rules.judge(DONE, attempt, written=True) for attempt in (1, 2)] == ["train", "train"]
    assert rules.judge("agent_failed", 1, written=False) == "drop"
    assert rules.judge("deadline", 1, written=False) == "again"
    with pytest.raises(KeyError, match="finished"):
        rules.judge("finished", 1, written=True)


def test_what_the_policy_is_to_blame_for_is_never_repeated() -> None:
    for end, policies in POLICIES.items():
        assert ("again" in policies) == (BLAME[end] not in ("policy", "none"))


def test_many_rows_are_explained() -> None:
    few = {"agentic/episodes": 4.0, "agentic/conversations": 7.0, "agentic/rows_of_reminder": 3.0}
    assert explain_rows(few) is None and explain_rows({}) is None
    many = {"agentic/episodes": 4.0, "agentic/conversations": 30.0}
    many |= {"agentic/rows_of_reminder": 20.0, "agentic/rows_of_tools": 2.0}
    said = explain_rows(many)
    assert said is not None and "7.5 rows of training an episode" in said
    assert "tools that change (2), a reminder that is only in the newest message (20), other " in said
    assert "other changes of the history (4)" in said
    assert ROW_REASONS.keys() < COUNTS.keys()


def one(turns: int | None = 2, end: str = DONE, attempts: int = 1) -> Trajectory:
    return Trajectory(
        key="a", first_version=0, last_version=0, num_tokens=3, turns=turns, end=end, attempts=attempts
    )


def groups(*trajectories: Trajectory, redundant: int = 0) -> list[Group]:
    episodes = tuple(replace(found, key=f"a_{i}_0") for i, found in enumerate(trajectories))
    return [Group(uid="a", step=1, trajectories=episodes, redundant=redundant)]


def test_an_episode_with_several_conversations_counts_once() -> None:
    keys = ["u_0_0", "u_0_1", "u_0_2", "u_1_0", "u_10_0"]
    rows = tuple(replace(one(4), key=key) for key in keys)
    assert [found.key for found in last_responses(rows)] == ["u_0_2", "u_1_0", "u_10_0"]
    found = metrics_of([Group(uid="u", step=1, trajectories=rows)])
    assert (found["agentic/episodes"], found["agentic/conversations"]) == (3.0, 5.0)
    assert found["agentic/end/done"] == 3.0
    assert found["agentic/turns/mean"] == pytest.approx(20 / 3)
    assert found["agentic/turns/max"] == 12.0


@pytest.mark.parametrize("turns", [None, 1])
def test_a_step_of_single_responses_has_no_metrics_of_agents(turns: int | None) -> None:
    assert metrics_of([]) == metrics_of(groups(*[one(turns)] * 3)) == {}


def test_a_second_answer_of_the_policy_makes_an_episode() -> None:
    assert metrics_of(groups(one(1), one(2)))["agentic/turns/max"] == 2.0


def test_a_step_has_metrics_of_each_data_source_of_several() -> None:
    rows = (replace(one(4), key="a_0_0"), replace(one(2), key="a_0_1", reward=1.0))
    math = Group(uid="a", step=1, source="math", trajectories=rows)
    code = Group(uid="b", step=1, source="code", trajectories=(replace(one(None), reward=-1.0),))
    assert metrics_by_source([math, code]) == {
        "source/code/episodes": 1.0,
        "source/code/reward/mean": -1.0,
        "source/math/episodes": 1.0,
        "source/math/reward/mean": 1.0,
        "source/math/turns/mean": 6.0,
    }
    assert metrics_by_source([math, math]) == metrics_by_source([]) == {}
    many = [Group(uid="a", step=1, source=f"{number:02}", trajectories=rows) for number in range(99)]
    assert len(metrics_by_source(many)) == 3 * MAX_SOURCES


def test_the_metrics_of_a_step_add_up_its_episodes() -> None:
    found = metrics_of(groups(one(2), one(6, attempts=3), one(4, end="deadline"), redundant=2))
    assert found == {
        "agentic/episodes": 3.0,
        "agentic/again": 2.0,
        "agentic/success": 0.0,
        "agentic/turns/mean": 4.0,
        "agentic/turns/max": 6.0,
        **{f"agentic/end/{end}": 0.0 for end in ENDS},
        "agentic/end/done": 2.0,
        "agentic/end/deadline": 1.0,
        "agentic/end/redundant": 2.0,
    }
    rewarded = [replace(one(4), reward=reward) for reward in (1.0, 0.0, -0.5)]
    assert metrics_of(groups(*rewarded))["agentic/success"] == pytest.approx(1 / 3)
    assert metrics_of(groups(replace(one(4, end="turns"), reward=1.0)))["agentic/success"] == 0.0
    assert metrics_of(groups(one(1, attempts=2)))["agentic/again"] == 1.0
    assert "agentic/turns/mean" not in metrics_of(groups(one(None, attempts=2)))
    assert metrics_of(groups(one(1), redundant=1))["agentic/end/redundant"] == 1.0


def test_the_episodes_of_recalled_groups_are_counted_in_the_step_that_trains_them() -> None:
    (twice,), (never,) = groups(one(2), one(2), redundant=1), groups(one(2))
    found = metrics_of([replace(twice, recalls=2), never])
    assert found["agentic/end/recalled"] == 6.0
    assert found["agentic/end/done"] == 3.0


def test_waits_are_counted_by_episode_and_by_request() -> None:
    waits = [replace(one(3), model_s=float(i), env_s=i / 10) for i in range(1, 21)]
    (group,) = groups(*waits, one(3))
    found = metrics_of([replace(group, took_ms=(1.0, 5.0)), replace(group, trajectories=(), took_ms=(2.0,))])
    assert (found["agentic/model_s/mean"], found["agentic/model_s/p95"]) == (10.5, 19.0)
    assert found["agentic/env_s/mean"] == pytest.approx(1.05)
    assert found["agentic/env_s/p95"] == 1.9
    assert found["agentic/gateway_ms_p95"] == 5.0
    rows = tuple(replace(waits[9], key=f"a_0_{i}") for i in range(3))
    again = metrics_of([Group(uid="a", step=1, trajectories=(*rows, replace(waits[19], key="a_1_0")))])
    assert again["agentic/model_s/mean"] == 15.0, "conversations of one episode share its seconds"
    assert not {"agentic/model_s/mean", "agentic/gateway_ms_p95"} & metrics_of(groups(one(3))).keys()


def test_versions_of_an_episode_are_counted_over_its_conversations() -> None:
    first = replace(one(2), key="u_0_0", spans=plain(((3, 0), (4, 2))))
    second = replace(one(2), key="u_0_1", spans=plain(((4, 0), (6, 1), (4, 5))))
    other = replace(one(2), key="u_1_0", spans=plain(((6, 0),)))
    found = metrics_of(
        [Group(uid="u", step=1, trajectories=(first, second, other, replace(one(2), key="u_2_0")))]
    )
    assert found["agentic/versions_per_episode/mean"] == 2.0
    assert found["agentic/versions_per_episode/max"] == 3.0


def test_of_sessions_that_are_open_at_once_the_most_count() -> None:
    counts = [
        {"open_sessions": 3, "coalesced": 1},
        {"open_sessions": 7},
        {"open_sessions": 5, "coalesced": 1},
    ]
    assert counted_together(counts) == {"open_sessions": 7, "coalesced": 2}
    told = [replace(group, counts=one) for group, one in zip([*groups(one(1))] * 3, counts, strict=True)]
    found = metrics_of(told)
    assert (found["agentic/open_sessions"], found["agentic/coalesced"]) == (7.0, 2.0)
    assert not PEAKS.keys() & COUNTS.keys()


def test_what_happened_in_episodes_is_counted_over_the_groups() -> None:
    counted = [
        replace(group, counts={"retries_coalesced": 2, "params_overridden": 0})
        for group in (*groups(one(4)), *groups(one(4)))
    ]
    found = metrics_of(counted)
    assert (found["agentic/retries_coalesced"], found["agentic/params_overridden"]) == (4.0, 0.0)
    assert "agentic/left_behind" not in found
    single = [replace(group, counts={"params_overridden": 1}) for group in groups(one(1))]
    assert metrics_of(single)["agentic/params_overridden"] == 1.0
