# SPDX-License-Identifier: Apache-2.0
"""The longest known text is found, and a long conversation is stored once."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.chains import ChainRow
from recipe.async_pipeline.gateway.conversation import Said
from recipe.async_pipeline.gateway.turns import ContinuedText, TurnRewards


def test_the_longest_text_that_is_known_is_continued() -> None:
    texts = ContinuedText()
    assert texts.known("Q: ") == (0, [])
    texts.note("Q: ", Said("one", stop="END"), [1, 2])
    assert texts.known("Q: one, more") == (6, [1, 2]) == texts.known("Q: one")
    assert texts.known("Q: oneEND, more") == (9, [1, 2])
    texts.note("Q: oneEND, more", Said(" two"), [1, 2, 3, 4])
    texts.note("Q: one, other", Said(" three"), [1, 2, 5])
    assert texts.known("Q: oneEND, more two.") == (19, [1, 2, 3, 4])
    assert texts.known("Q: one, other three") == (19, [1, 2, 5])
    assert texts.known("Q: one, others") == (6, [1, 2])
    texts.note("Q: one", Said(""), [1, 2, 6])
    assert texts.known("Q: one") == (6, [1, 2]), "an answer without a text has no place in another one"


def stored(text: ContinuedText) -> int:
    return len(text._token_ids) + sum(len(rest) + stored(one) for rest, one in text._after.items())


def test_a_long_conversation_is_stored_once() -> None:
    texts, text, tokens = ContinuedText(), "Q", [0]
    for turn in range(50):
        _, known = texts.known(text)
        assert known == tokens[:-1]
        texts.note(text, Said("answer"), [*tokens, turn])
        text, tokens = text + "answer, ", [*tokens, turn, 0]
    assert stored(texts) < 2 * (len(text) + len(tokens))


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
