# SPDX-License-Identifier: Apache-2.0
"""Questions about a few words that a small instruct model answers right at times. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DATA_SOURCE = "async_pipeline/words"
WORDS = (
    *("apple", "basket", "bridge", "candle", "castle", "cloud", "dragon", "engine", "flower", "forest"),
    *("garden", "guitar", "hammer", "horse", "island", "jungle", "kitchen", "lemon", "mirror", "music"),
    *("needle", "ocean", "orange", "paper", "pencil", "queen", "rabbit", "river", "saddle", "silver"),
    *("stone", "table", "ticket", "uncle", "violin", "wagon", "window", "winter", "yellow", "zebra"),
)


@dataclass(frozen=True, order=True)
class Question:
    """One question, and the only answer that is right."""

    kind: str
    text: str
    answer: str


def _first(rng: random.Random) -> Question:
    words = rng.sample(WORDS, 3)
    return Question("first", f"First word of: {' '.join(words)}", words[0])


def _last(rng: random.Random) -> Question:
    words = rng.sample(WORDS, 3)
    return Question("last", f"Last word of: {' '.join(words)}", words[-1])


def _swap(rng: random.Random) -> Question:
    one, other = rng.sample(WORDS, 2)
    return Question("swap", f"Swap: {one} {other}", f"{other} {one}")


def _longest(rng: random.Random) -> Question:
    words = rng.sample(WORDS, 3)
    while len({*map(len, words)}) < len(words):
        words = rng.sample(WORDS, 3)
    return Question("longest", f"Longest word of: {' '.join(words)}", max(words, key=len))


KINDS: Mapping[str, Callable[[random.Random], Question]] = {
    "first": _first,
    "last": _last,
    "swap": _swap,
    "longest": _longest,
}
SYSTEM = "Answer."
"""In place of the longer message of the model's chat template."""
SHOWN = 2
"""Questions of the same kind that a prompt begins with, answered. One alone is not enough for this model."""


@dataclass(frozen=True, kw_only=True)
class WordsTask:
    """The set of questions."""

    num_train: int = 2048
    num_val: int = 64

    def questions(self, seed: int) -> tuple[list[Question], list[Question]]:
        """Return questions to train on and held-out ones, none in both, the kinds in turn."""
        rng = random.Random(seed)
        found: dict[Question, None] = {}
        kinds = itertools.cycle(KINDS.values())
        while len(found) < self.num_train + self.num_val:
            found.setdefault(next(kinds)(rng))
        every = list(found)
        return every[self.num_val :], every[: self.num_val]


def messages_of(question: Question) -> list[dict[str, str]]:
    """Return the chat of a prompt: the answered questions of its kind, which are always the same, and it."""
    rng = random.Random(question.kind)
    chat = [{"role": "system", "content": SYSTEM}]
    for shown in (KINDS[question.kind](rng) for _ in range(SHOWN)):
        chat += [{"role": "user", "content": shown.text}, {"role": "assistant", "content": shown.answer}]
    return [*chat, {"role": "user", "content": question.text}]


def word_rows(questions: Sequence[Question], split_name: str) -> list[dict[str, Any]]:
    """Return a row of each question, in verl's columns."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": messages_of(question),
            "ability": question.kind,
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"index": index, "split": split_name},
        }
        for index, question in enumerate(questions)
    ]
