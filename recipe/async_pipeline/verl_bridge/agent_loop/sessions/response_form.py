# SPDX-License-Identifier: Apache-2.0
"""The form of an answer as the engines take it: a JSON Schema, or a structural tag of XGrammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ....errors import RequestRefused
from ....gateway.turns import ANY_TOOL, Form

CALLS: Mapping[str, tuple[str, str, str]] = {
    "hermes": ('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>"),
}
"""What is before the name of a tool, between it and its arguments, and after them, by the names of verl's
parsers. The arguments are JSON."""


def structured(form: Form, tool_format: str | None) -> dict[str, str]:
    """Return the only entry of the parameters of structured outputs, `json` or `structural_tag`.

    `tool_format`: the name of verl's parser. Raises RequestRefused if calls of tools are to have a form that
    is unknown for it.
    """
    if form.call is None and not form.tools:
        return {"json": json.dumps(form.schema)}
    if tool_format is None or tool_format not in CALLS:
        field = "a response format with tools" if form.call is None else "tool_choice"
        raise RequestRefused(
            f"{field}: answers have this form with actor_rollout_ref.rollout.multi_turn.format="
            f"{' or '.join(CALLS)} only, got {tool_format}; leave it out"
        )
    calls = _calls(form, CALLS[tool_format])
    answer = {"type": "json_schema", "json_schema": form.schema}
    either = calls if form.call is not None else {"type": "or", "elements": [answer, calls]}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": either})}


def _calls(form: Form, marks: tuple[str, str, str]) -> dict[str, Any]:
    """Return the form of one or more calls of the tools that may be called."""
    before, between, after = marks
    functions = [one["function"] for one in form.tools]
    tags = [
        {
            "begin": f"{before}{json.dumps(one['name'], ensure_ascii=False)}{between}",
            "content": {"type": "json_schema", "json_schema": one["parameters"]},
            "end": after,
        }
        for one in functions
        if form.call in (None, ANY_TOOL, one["name"])
    ]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        # A tool that is named is called once.
        "stop_after_first": bool(form.call),
    }
