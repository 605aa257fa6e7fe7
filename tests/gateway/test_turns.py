# SPDX-License-Identifier: Apache-2.0
"""The longest known text is found, and a long conversation is stored once."""

from __future__ import annotations

from recipe.async_pipeline.gateway.conversation import Said
from recipe.async_pipeline.gateway.turns import ContinuedText


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
