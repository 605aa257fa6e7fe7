# SPDX-License-Identifier: Apache-2.0
"""Spans of several turns become the spans of one response."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from recipe.async_pipeline.core.groups.items import spans_of
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import kept_turns, take_turn, taken_turns
from recipe.async_pipeline.verl_bridge.agent_loop.tokens.version_spans import (
    COSTS,
    ROW_SPANS,
    ROW_TURNS,
    TURNS,
    ResponseTurn,
    add_fields,
    cost_columns,
    costs_of,
    fields_of,
    merged,
    waits_of,
)


def test_positions_count_from_the_end_of_the_prompt() -> None:
    # A prompt of 5; an answer of 4, a tool's 3, an answer of 2 that a load cut in two.
    turns = [ResponseTurn(5, spans_of([[7, 0]])), ResponseTurn(12, spans_of([[7, 0], [8, 1]]))]
    assert merged(turns, 5) == [(7, 0), (7, 7), (8, 8)]


def test_the_fields_of_a_response() -> None:
    turns = [ResponseTurn(5, spans_of([[7, 0]])), ResponseTurn(12, spans_of([[7, 0], [8, 1]]))]
    assert fields_of([], 5, None) == {}
    assert fields_of(turns, 5, None) == {
        "min_global_steps": 7,
        "max_global_steps": 8,
        "version_spans": [(7, 0), (7, 7), (8, 8)],
    }
    known = fields_of(turns, 5, spans_of([(8, 1)]))
    assert known == {"min_global_steps": 8, "max_global_steps": 8, "version_spans": [(8, 1)]}, "its own only"


def response(**told: Any) -> Any:
    return SimpleNamespace(prompt_ids=[0] * 5, num_turns=9, extra_fields=told)


def test_a_turn_is_an_answer_of_the_policy() -> None:
    turns = [
        ResponseTurn(5, spans_of([[7, 0]])),
        ResponseTurn(12, spans_of([[7, 0], [8, 1]])),
        ResponseTurn(20, spans_of([[8, 0]])),
    ]
    alone = response()
    add_fields([alone], turns)
    assert (alone.extra_fields[TURNS], len(alone.extra_fields["version_spans"])) == (3, 4)
    add_fields([unversioned := response()], [])
    assert unversioned.extra_fields == {}


def test_the_turns_of_several_responses() -> None:
    turns = [
        ResponseTurn(5, spans_of([[7, 0]])),
        ResponseTurn(12, spans_of([[7, 0], [8, 1]])),
        ResponseTurn(20, spans_of([[8, 0]])),
    ]
    told = [response(**{ROW_SPANS: [(7, 0)], ROW_TURNS: 1}), response(**{ROW_SPANS: [(8, 1)], ROW_TURNS: 2})]
    add_fields(told, turns)
    assert [one.extra_fields[TURNS] for one in told] == [1, 2]
    assert [one.extra_fields["version_spans"] for one in told] == [[(7, 0)], [(8, 1)]]
    assert not {ROW_SPANS, ROW_TURNS} & {name for one in told for name in one.extra_fields}

    untold = [response(), response()]
    add_fields(untold, turns)
    assert [one.extra_fields.get(TURNS) for one in untold] == [None, 3], "all of the episode's, once"
    assert [one.extra_fields["version_spans"] for one in untold] == [None, None]


def test_an_agent_that_forgets_its_history_has_no_negative_costs() -> None:
    turns = [ResponseTurn(50, spans_of([[7, 0]]), tokens=9), ResponseTurn(5, spans_of([[7, 0]]), tokens=2)]
    assert costs_of(turns, 1.0)["observation_tokens"] == 0


async def test_tasks_do_not_see_each_others_turns() -> None:
    async def answer(version: int) -> list[ResponseTurn]:
        with kept_turns():
            for turn in range(2):
                await asyncio.sleep(0)
                take_turn(turn, [[version, 0]])
            return taken_turns()

    assert await asyncio.gather(*(answer(version) for version in range(3))) == [
        [ResponseTurn(0, spans_of([[v, 0]])), ResponseTurn(1, spans_of([[v, 0]]))] for v in range(3)
    ]


def test_outside_and_without_spans_nothing_is_kept() -> None:
    take_turn(3, [[1, 0]])
    assert taken_turns() == []
    with kept_turns() as turns:
        take_turn(3, None)
        take_turn(3, [])
    assert turns == []


def test_costs_are_added_up_over_turns() -> None:
    # A prompt of 5; 4 tokens, a tool's 3, 2 tokens.
    turns = [
        ResponseTurn(5, spans_of([[7, 0]]), tokens=4, seconds=0.5),
        ResponseTurn(12, spans_of([[7, 0]]), tokens=2, seconds=0.25),
    ]
    assert costs_of(turns, 2.0) == {
        "turns": 2,
        "prompt_tokens": 5,
        "tokens": 6,
        "observation_tokens": 3,
        "generate_s": 0.75,
        "environment_s": 1.25,
    }


def test_requests_at_the_same_time_are_waited_for_once() -> None:
    at = [(12.0, 3.0), (10.5, 1.0), (13.0, 1.0), (14.0, 2.0)]
    turns = [ResponseTurn(5, spans_of([[7, 0]]), seconds=seconds, began=began) for began, seconds in at]
    assert waits_of(turns, 10.0, 20.0) == (5.0, 5.0)
    assert waits_of(turns, 10.0, 20.0, excused_s=4.0) == (5.0, 1.0)
    assert waits_of(turns, 10.0, 20.0, excused_s=9.0) == (5.0, 0.0)
    assert waits_of([], 10.0, 20.0) == (0.0, 10.0)


def test_costs_of_a_group_are_columns_with_all_figures() -> None:
    found = cost_columns([costs_of([], 1.0) | {"score_s": 0.1234567}, {}])
    assert tuple(found) == COSTS
    assert found["score_s"] == [0.123457, 0.0]
    assert found["environment_s"] == [1.0, 0.0]
