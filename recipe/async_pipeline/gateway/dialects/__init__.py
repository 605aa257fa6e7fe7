# SPDX-License-Identifier: Apache-2.0
"""The APIs that agents may use. Another one is a module with a `wire.Dialect` and a line here."""

from __future__ import annotations

from ..wire import CountingDialect, Dialect
from .anthropic_messages import AnthropicMessages
from .openai_chat import OpenAIChat
from .openai_completions import OpenAICompletions
from .openai_responses import OpenAIResponses

GROUPS = ("honoured", "checked", "refused", "counted", "neutral")

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), AnthropicMessages(), OpenAIResponses(), OpenAICompletions())
COUNTING: tuple[CountingDialect, ...] = (AnthropicMessages(), OpenAIResponses())
"""The ones that also tell how many tokens a request has."""


def parameter_table() -> str:
    """Return what all APIs, and then each one, do with their parameters, as a table of Markdown."""
    head = ["endpoint", "honoured", "refused with some values", "refused", "counted", "nothing to do"]
    sets = {f"`{one.path}`": [set(getattr(one.parameters, group)) for group in GROUPS] for one in DIALECTS}
    shared = [set.intersection(*groups) for groups in zip(*sets.values(), strict=True)]

    rows = [head, ["---"] * len(head)]
    for path, groups in {"all": shared, **sets}.items():
        own = groups if path == "all" else [a - b for a, b in zip(groups, shared, strict=True)]
        rows.append([path, *(", ".join(f"`{name}`" for name in sorted(names)) for names in own)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
