# SPDX-License-Identifier: Apache-2.0
"""The form of an answer as the engines take it: a JSON Schema, or a structural tag of XGrammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ....errors import RequestRefused
from ....gateway.turns import ANY_TOOL, Form


class CallFormat(NamedTuple):
    """How a family of models writes calls of tools."""

    before: str
    """Before the name of a tool."""
    between: str
    """Between its name and its arguments."""
    after: str
    """After its arguments."""
    opening: str = ""
    """Before all calls."""
    closing: str = ""
    """After all calls."""
    separator: str = "\n"
    """Between two calls."""
    style: str = "json"
    """XGrammar's name for the form of the arguments."""
    numbered: str = ""
    """What follows the number of a call, if `between` has one after it."""


CALLS: Mapping[str, CallFormat] = {
    "hermes": CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "qwen3_coder": CallFormat(
        "<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>", style="qwen_xml"
    ),
    "seed": CallFormat(
        "<seed:tool_call>\n<function=", ">\n", "\n</function>\n</seed:tool_call>", style="qwen_xml"
    ),
    "glm": CallFormat("<tool_call>", "", "</tool_call>", style="glm_xml"),
    "minimax": CallFormat(
        '<invoke name="',
        '">\n',
        "</invoke>\n",
        opening="<minimax:tool_call>\n",
        closing="</minimax:tool_call>",
        separator="",
        style="minimax_xml",
    ),
    "deepseek_v4": CallFormat(
        '<｜DSML｜invoke name="',
        '">\n',
        "</｜DSML｜invoke>\n",
        opening="\n\n<｜DSML｜tool_calls>\n",
        closing="</｜DSML｜tool_calls>",
        separator="",
        style="deepseek_xml",
    ),
    "kimi": CallFormat(
        "<|tool_call_begin|>functions.",
        ":",
        "<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        separator="",
        numbered="<|tool_call_argument_begin|>",
    ),
    "gpt-oss": CallFormat(
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        "<|call|>",
        separator="<|start|>assistant",
    ),
}
"""By the names of verl's parsers. XGrammar has no form for the arguments of the others."""


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


def _calls(form: Form, marks: CallFormat) -> dict[str, Any]:
    """Return the form of one or more calls of the tools that may be called."""
    functions = [one["function"] for one in form.tools]
    tags = [
        {
            "type": "tag",
            "begin": f"{marks.before}{json.dumps(one['name'], ensure_ascii=False)[1:-1]}{marks.between}",
            "content": _arguments(one["parameters"], marks),
            "end": marks.after,
        }
        for one in functions
        if form.call in (None, ANY_TOOL, one["name"])
    ]
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": marks.separator,
        "at_least_one": True,
        # A tool that is named is called once.
        "stop_after_first": bool(form.call),
    }
    if not marks.opening:
        return calls
    return {"type": "tag", "begin": marks.opening, "content": calls, "end": marks.closing}


def _arguments(schema: Mapping[str, Any], marks: CallFormat) -> dict[str, Any]:
    arguments: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    if marks.style != "json":
        arguments["style"] = marks.style
    if not marks.numbered:
        return arguments
    number = {"type": "regex", "pattern": "[0-9]+"}
    return {
        "type": "sequence",
        "elements": [number, {"type": "const_string", "value": marks.numbered}, arguments],
    }
