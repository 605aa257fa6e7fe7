# SPDX-License-Identifier: Apache-2.0
"""What of an answer is reasoning, by the family of the model, as servers tell it from the answer.

    tags       Qwen3, DeepSeek   <think> reasoning </think> answer
    channels   gpt-oss           <|channel|>analysis<|message|> reasoning <|end|>
                                 <|start|>assistant<|channel|>final<|message|> answer
    neither                      all is the answer

The tokenizer tells the family: each has tokens that the others lack.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

THINK, END_OF_THINK, CHANNEL = "<think>", "</think>", "<|channel|>"
MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<before>[^<]*)<\|channel\|>(?P<header>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<text>.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|$)",
    re.DOTALL,
)


class Spoken(NamedTuple):
    """What is not reasoning."""

    text: str
    token_ids: list[int]
    """In which tool calls are looked for."""
    without_calls: bool = False
    """The text has no tool calls."""


class Reasoning(Protocol):
    """How a family of models writes its reasoning."""

    def split(self, token_ids: Sequence[int]) -> tuple[str, Spoken]:
        """Return the reasoning and the answer."""


class NoReasoning:
    """A model that does not reason."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def split(self, token_ids: Sequence[int]) -> tuple[str, Spoken]:
        """See `Reasoning`."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return "", Spoken(text, list(token_ids))


class Tags:
    """A model that reasons up to `</think>`."""

    def __init__(self, tokenizer: Any, opened_by_prompt: bool) -> None:
        self._tokenizer, self._opened = tokenizer, opened_by_prompt
        self._begin, self._end = tokenizer.convert_tokens_to_ids([THINK, END_OF_THINK])

    def split(self, token_ids: Sequence[int]) -> tuple[str, Spoken]:
        """See `Reasoning`. Without an end, all that was begun is reasoning."""
        ids = list(token_ids)
        if self._end in ids:
            at = len(ids) - ids[::-1].index(self._end)
        elif self._opened or self._begin in ids:
            at = len(ids)
        else:
            return "", Spoken(self._decoded(ids), ids)
        reasoning = self._decoded(ids[:at]).replace(THINK, "").removesuffix(END_OF_THINK).strip()
        return reasoning, Spoken(self._decoded(ids[at:]).lstrip("\n"), ids[at:])

    def _decoded(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class Channels:
    """A model that writes messages to channels."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The prompt ends with it, and verl's parser expects it before each call.
        self._begun: list[int] = tokenizer.encode("<|start|>assistant", add_special_tokens=False)

    def split(self, token_ids: Sequence[int]) -> tuple[str, Spoken]:
        """See `Reasoning`. Text outside of channels is the answer."""
        written = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        reasoning: list[str] = []
        texts: list[str] = []
        for found in MESSAGE.finditer(written):
            if "to=" in found["header"] + found["before"]:
                continue  # a tool call
            (reasoning if found["header"].split()[:1] == ["analysis"] else texts).append(found["text"])
        if not reasoning and not texts and CHANNEL not in written:
            texts = [self._tokenizer.decode(token_ids, skip_special_tokens=True)]
        answer = Spoken("\n".join(texts), [*self._begun, *token_ids], without_calls=True)
        return "\n".join(reasoning), answer


def has_think_tags(tokenizer: Any) -> bool:
    """Return whether a tokenizer has tokens for the beginning and the end of reasoning."""
    known = tokenizer.get_vocab()
    return THINK in known and END_OF_THINK in known


def reasoning_of(tokenizer: Any, *, opened_by_prompt: bool = False) -> Reasoning:
    """Return how the model of a tokenizer writes its reasoning.

    `opened_by_prompt`: the chat template has written `<think>` before each answer.
    """
    if CHANNEL in tokenizer.get_vocab():
        return Channels(tokenizer)
    return Tags(tokenizer, opened_by_prompt) if has_think_tags(tokenizer) else NoReasoning(tokenizer)
