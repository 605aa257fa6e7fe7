# SPDX-License-Identifier: Apache-2.0
"""Which version wrote which token of a response of several turns.

Each turn is a separate request whose output names the versions that wrote it. verl's agent loops keep only
the first turn's versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....core.groups.items import TokenSpan, spans_of

COSTS = ("turns", "prompt_tokens", "tokens", "observation_tokens", "generate_s", "environment_s", "score_s")
"""The measured cost of a response: tokens that the model wrote and that tools returned, and seconds with the
engines, with tools and other code, and until the response had its score.
"""
ROW_SPANS, ROW_TURNS = "row_version_spans", "row_turns"
"""Fields with which an agent loop that returns several responses tells the spans and the turns of each."""
TURNS = "policy_turns"
"""Field with the number of turns that the policy wrote in a response. verl's `num_turns` counts messages."""


class ResponseTurn(NamedTuple):
    """One request of a response."""

    prompt_tokens: int
    """Tokens of everything before it: the prompt, earlier turns, and tool output."""
    spans: Sequence[TokenSpan]
    """Positions count from the first token of this turn."""
    replica: str = ""
    """The replica that generated it, if known."""
    tokens: int = 0
    """Tokens generated in this turn."""
    seconds: float = 0.0
    """Seconds from the request to its output."""
    began: float = 0.0
    """When it was requested, by `time.perf_counter`."""


def writer_of(turns: Sequence[ResponseTurn], prompt_tokens: int, position: int) -> str:
    """Describe the writer of the token at a position in the response, as far as the turns tell."""
    found = ""
    for turn in turns:
        for version, start in turn.spans:
            if turn.prompt_tokens - prompt_tokens + start <= position or not found:
                found = f"{turn.replica or 'a replica'} with version {version}"
    return found


def merged(turns: Sequence[ResponseTurn], prompt_tokens: int) -> list[TokenSpan]:
    """Return the spans by position in the response, for a response whose prompt has `prompt_tokens`.

    At least one span for each turn, even where the version did not change.
    """
    return [
        TokenSpan(version, turn.prompt_tokens - prompt_tokens + start)
        for turn in turns
        for version, start in turn.spans
    ]


def fields_of(
    turns: Sequence[ResponseTurn], prompt_tokens: int, row_spans: Sequence[TokenSpan] | None
) -> dict[str, Any]:
    """Return the versions of a response as verl's extra fields; empty if none are known.

    `row_spans`: of this response, if the agent loop knows them; else all turns are this response's.
    """
    spans: Sequence[TokenSpan] = merged(turns, prompt_tokens) if row_spans is None else spans_of(row_spans)
    if not spans:
        return {}
    versions = [span.version for span in spans]
    pairs = [tuple(span) for span in spans]
    return {"min_global_steps": min(versions), "max_global_steps": max(versions), "version_spans": pairs}


def add_fields(outputs: Sequence[Any], turns: Sequence[ResponseTurn]) -> None:
    """Add versions and turns to verl's extra fields of the responses of an episode with these turns.

    Where an agent loop returns several responses, and does not say which turns are in which, their versions
    stay unknown, and the last one has all turns.
    """
    for one in outputs:
        row_spans, row_turns = one.extra_fields.pop(ROW_SPANS, None), one.extra_fields.pop(ROW_TURNS, None)
        found = fields_of(turns, len(one.prompt_ids), row_spans)
        if found and (row_spans is not None or len(outputs) == 1):
            found[TURNS] = len(turns) if row_turns is None else row_turns
        elif found:
            found["version_spans"] = None
            if one is outputs[-1]:
                found[TURNS] = len(turns)
        one.extra_fields.update(found)


def costs_of(turns: Sequence[ResponseTurn], seconds: float) -> dict[str, float]:
    """Return all of `COSTS` but `score_s`. `seconds`: from the response's start until it could be scored."""
    generate_s = sum(turn.seconds for turn in turns)
    return {
        "turns": len(turns),
        "prompt_tokens": turns[0].prompt_tokens if turns else 0,
        "tokens": sum(turn.tokens for turn in turns),
        # An agent that forgets its history has a last prompt that is shorter than what was written.
        "observation_tokens": max(
            0, turns[-1].prompt_tokens - turns[0].prompt_tokens - sum(t.tokens for t in turns[:-1])
        )
        if turns
        else 0,
        "generate_s": generate_s,
        "environment_s": max(0.0, seconds - generate_s),
    }


def waits_of(
    turns: Sequence[ResponseTurn], began: float, ended: float, excused_s: float = 0.0
) -> tuple[float, float]:
    """Return for how many seconds an episode waited for the policy, and for anything else.

    Requests at the same time count once. `excused_s`: seconds in between that are not the episode's.
    """
    model_s, until = 0.0, began
    for turn in sorted(turns, key=lambda turn: turn.began):
        end = turn.began + turn.seconds
        model_s += max(0.0, end - max(turn.began, until))
        until = max(until, end)
    return model_s, max(0.0, ended - began - model_s - excused_s)


def times_of(turns: Sequence[ResponseTurn], began: float) -> list[list[float]]:
    """Return start and seconds of each turn of a response that began then; empty for a single turn."""
    if len(turns) < 2:
        return []
    return [[round(turn.began - began, 4), round(turn.seconds, 4)] for turn in turns]


def cost_columns(costs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the costs of the responses of a group, a list for each figure."""
    return {name: [round(cost.get(name, 0.0), 6) for cost in costs] for name in COSTS}
