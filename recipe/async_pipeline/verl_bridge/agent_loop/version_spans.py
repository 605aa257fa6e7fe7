# SPDX-License-Identifier: Apache-2.0
"""Which version wrote which token of an answer of several turns.

Each turn is a request of its own, and says which versions wrote it. verl's agent loops keep what the first
one said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

COSTS = ("turns", "prompt_tokens", "tokens", "observation_tokens", "generate_s", "environment_s", "score_s")
"""What is known of the cost of an answer: tokens that the model wrote and that tools said, and seconds with
the engines,
with tools and whatever else is no engine, and until it had its score."""
Span = tuple[int, int]
"""A version, and the position of the first token that it wrote; it wrote those until the next span."""


class Turn(NamedTuple):
    """One request of an answer."""

    prompt_tokens: int
    """Tokens of everything before it: the prompt, earlier turns, and what tools said."""
    spans: Sequence[Sequence[int]]
    """`(version, token of this turn)`."""
    replica: str = ""
    """Which one answered it, if it says so."""
    tokens: int = 0
    """Written in this turn."""
    seconds: float = 0.0
    """From the request to its answer."""


_turns: ContextVar[list[Turn] | None] = ContextVar("turns of the answer that this task writes", default=None)


@contextmanager
def kept_turns() -> Iterator[list[Turn]]:
    """Gets the turns that are taken inside, by this task and those that it starts."""
    turns: list[Turn] = []
    token = _turns.set(turns)
    try:
        yield turns
    finally:
        _turns.reset(token)


def taken_turns() -> list[Turn]:
    """Those so far; none outside of `kept_turns`."""
    return list(_turns.get() or ())


def take_turn(
    prompt_tokens: int,
    spans: Sequence[Sequence[int]] | None,
    replica: str = "",
    tokens: int = 0,
    seconds: float = 0.0,
) -> None:
    """A request was answered. One that does not say by which versions is not kept."""
    turns = _turns.get()
    if turns is not None and spans:
        turns.append(Turn(prompt_tokens, spans, replica, tokens, seconds))


def writer_of(turns: Sequence[Turn], prompt_tokens: int, position: int) -> str:
    """Who wrote the token at a position in the response, in words; as far as the turns tell."""
    found = ""
    for turn in turns:
        for version, start in turn.spans:
            if turn.prompt_tokens - prompt_tokens + int(start) <= position or not found:
                found = f"{turn.replica or 'a replica'} with version {version}"
    return found


def merged(turns: Sequence[Turn], prompt_tokens: int) -> list[Span]:
    """Spans by the position in the response, of an answer whose prompt has `prompt_tokens`.

    One for each turn at least, also where the version did not change.
    """
    return [
        (int(version), turn.prompt_tokens - prompt_tokens + int(start))
        for turn in turns
        for version, start in turn.spans
    ]


def costs_of(turns: Sequence[Turn], seconds: float) -> dict[str, float]:
    """Of an answer that took so long until it was to be scored: all of `COSTS` but `score_s`."""
    generate_s = sum(turn.seconds for turn in turns)
    return {
        "turns": len(turns),
        "prompt_tokens": turns[0].prompt_tokens if turns else 0,
        "tokens": sum(turn.tokens for turn in turns),
        "observation_tokens": turns[-1].prompt_tokens
        - turns[0].prompt_tokens
        - sum(t.tokens for t in turns[:-1])
        if turns
        else 0,
        "generate_s": generate_s,
        "environment_s": max(0.0, seconds - generate_s),
    }


def cost_columns(costs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The costs of the answers of a group, a list for each figure."""
    return {name: [round(cost.get(name, 0.0), 6) for cost in costs] for name in COSTS}
