# SPDX-License-Identifier: Apache-2.0
"""A reward of a turn is at the last token that the policy wrote in it."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.chains import ChainRow
from recipe.async_pipeline.gateway.turn_rewards import TurnRewards

MASK = [1, 1, 1, 0, 0, 1, 1, 0, 1, 0]


def row(mask: list[int]) -> ChainRow:
    return ChainRow([0] * 4, [0] * len(mask), mask, None, [], 3)


def turns() -> TurnRewards:
    """Return three turns that were written after a prompt of four tokens, and an empty one."""
    made = TurnRewards(allowed=True)
    for name, start, end in (("a1", 4, 7), ("b2", 9, 11), ("c3", 12, 12), ("d4", 12, 13)):
        made.answered(name, start, end)
    return made


def test_rewards_are_at_the_ends_of_their_turns_and_the_last_one_of_a_turn_counts() -> None:
    found = turns()
    found.give(4, 1.0)
    found.give("chatcmpl-a1", 9.0)
    found.give("msg_a1", 0.5)
    found.give("b2", -1.0)
    assert found.rewards == {4: 1.0, 1: 0.5, 2: -1.0}
    assert found.placed(row(MASK), None) == [(2, 0.5), (6, -1.0), (8, 1.0)]
    assert found.placed(row(MASK), 3.0)[3:] == [(8, 3.0)], "the policy wrote no later token"
    assert turns().placed(row(MASK), 3.0) == []


def test_an_end_token_that_was_replaced_is_not_rewarded() -> None:
    found = turns()
    found.give(1, 1.0)
    assert found.placed(row([1, 1, 0, 0, 0, 1, 1, 0, 1]), None) == [(1, 1.0)]


def test_an_answer_that_is_lost_is_not_rewarded() -> None:
    found = turns()
    found.give(2, 1.0)
    found.give(4, 1.0)
    assert found.placed(row(MASK[:7]), None) == [(6, 1.0)]
    assert found.placed(row(MASK[:3]), None) == []


@pytest.mark.parametrize("turn", [0, 5, -1, "e5", "", "chatcmpl-"])
def test_a_turn_that_does_not_exist(turn: int | str) -> None:
    found = turns()
    with pytest.raises(RequestRefused, match="turn must be a number from 1 to 4, or the id") as why:
        found.give(turn, 1.0)
    assert why.value.status == 422 and found.rewards == {}
    with pytest.raises(RequestRefused, match="turn must be left out, got .*; the session has 0 answers"):
        TurnRewards(allowed=True).give(turn, 1.0)


def test_a_turn_without_an_id_has_a_number_only() -> None:
    found = turns()
    found.answered("", 13, 14)
    with pytest.raises(RequestRefused, match="a number from 1 to 5"):
        found.give("chatcmpl-", 1.0)
    found.give(5, 1.0)
    assert found.rewards == {5: 1.0}


def test_a_turn_without_a_token_has_no_place_for_a_reward() -> None:
    with pytest.raises(RequestRefused, match="turn 3 has no token"):
        turns().give(3, 1.0)


def test_a_run_without_rewards_of_turns_refuses_them() -> None:
    found = TurnRewards(allowed=False)
    found.answered("a1", 4, 7)
    with pytest.raises(RequestRefused, match=r"requires agentic\.turn_rewards=True; leave turn out"):
        found.give(1, 1.0)
