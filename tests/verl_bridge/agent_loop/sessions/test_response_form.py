# SPDX-License-Identifier: Apache-2.0
"""Forms of answers as engines take them; `e2e/test_engine.py` has engines write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from verl.experimental.agent_loop.tool_parser import ToolParser
from xgrammar.testing import _is_grammar_accept_string

from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.turns import ANY_TOOL, Form
from recipe.async_pipeline.verl_bridge.agent_loop.sessions.response_form import (
    ANY,
    CALLS,
    structured,
    type_of,
)
from recipe.async_pipeline.verl_bridge.agent_loop.sessions.session_policy import _schemas

SCHEMA = {"type": "object"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("a", "b")]


def tag(form: Form) -> dict[str, Any]:
    found = json.loads(structured(form, "hermes")["structural_tag"])
    assert found["type"] == "structural_tag"
    written: dict[str, Any] = found["format"]
    return written


@pytest.mark.parametrize("tool_format", [None, "hermes", "gemma4"])
def test_a_schema_without_tools_needs_no_format_of_calls(tool_format: str | None) -> None:
    assert structured(Form(schema=SCHEMA), tool_format) == {"json": json.dumps(SCHEMA)}


@pytest.mark.parametrize(("call", "names", "once"), [(ANY_TOOL, ["a", "b"], False), ("b", ["b"], True)])
def test_calls_of_tools(call: str, names: list[str], once: bool) -> None:
    calls = tag(Form(call=call, tools=TOOLS))
    assert (calls["at_least_one"], calls["stop_after_first"]) == (True, once)
    assert [one["begin"] for one in calls["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names
    ]
    assert {one["end"] for one in calls["tags"]} == {"}\n</tool_call>"}


def test_a_schema_with_tools_permits_either() -> None:
    either = tag(Form(schema=SCHEMA, tools=TOOLS))
    answer, calls = either["elements"]
    assert (either["type"], answer["json_schema"], len(calls["tags"])) == ("or", SCHEMA, 2)


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (Form(call=ANY_TOOL, tools=TOOLS), "tool_choice"),
        (Form(schema=SCHEMA, tools=TOOLS), "a response format with tools"),
    ],
)
@pytest.mark.parametrize("tool_format", ["gemma4", "gpt-oss"])
def test_calls_in_another_format_are_refused(form: Form, field: str, tool_format: str) -> None:
    with pytest.raises(
        RequestRefused, match=rf"^{field}.*format=hermes or .* only, got {tool_format}; leave"
    ):
        structured(form, tool_format)


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
FORECAST = {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}}
DSML = "｜DSML｜"
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "forecast", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=forecast>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>"
    ),
    "seed": (
        "<seed:tool_call>\n<function=forecast>\n<parameter=city>Bonn</parameter>\n<parameter=days>3"
        "</parameter>\n</function>\n</seed:tool_call>"
    ),
    "glm": (
        "<tool_call>forecast\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="forecast">\n<parameter name="city">Bonn</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "deepseek_v4": (
        f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="forecast">\n'
        f'<{DSML}parameter name="city" string="true">Bonn</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}tool_calls>"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>"
        '{"city": "Bonn", "days": 3}<|tool_call_end|><|tool_calls_section_end|>'
    ),
}


class Letters:
    """A tokenizer with a token for each letter."""

    pad_token = "<pad>"

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def convert_tokens_to_ids(self, token: str) -> int:
        return -1


@pytest.mark.parametrize("tool_format", CALLS)
@pytest.mark.parametrize("call", [ANY_TOOL, "forecast", None])
async def test_what_the_form_permits_is_read_as_the_call(tool_format: str, call: str | None) -> None:
    schema = SCHEMA if call is None else None
    form = Form(schema=schema, call=call, tools=[FORECAST])
    grammar = xgrammar.Grammar.from_structural_tag(structured(form, tool_format)["structural_tag"])
    text = WRITTEN[tool_format]
    assert _is_grammar_accept_string(grammar, text)
    assert not _is_grammar_accept_string(grammar, text.replace("3", "x")), "days is a number"
    assert not _is_grammar_accept_string(grammar, text.replace("forecast", "delete"))
    assert not _is_grammar_accept_string(grammar, "It will rain.")

    parser = ToolParser.get_tool_parser(tool_format, Letters())
    content, (found,) = await parser.extract_tool_calls([ord(one) for one in text], _schemas([FORECAST]))
    assert (content.strip(), found.name) == ("", "forecast")
    assert json.loads(found.arguments) == {"city": "Bonn", "days": 3}


ROOT = {
    "$defs": {
        "Point": {"type": "object"},
        "Color": {"enum": ["red"]},
        "Loop": {"$ref": "#/$defs/Loop"},
    }
}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "integer"),
        ({"type": ["null", "number"]}, "number"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Point"}]}, "object"),
        ({"oneOf": [{"type": "array"}]}, "array"),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}, "string"),
        ({"enum": [None, 3]}, "integer"),
        ({"const": True}, "boolean"),
        ({"$ref": "#/$defs/Loop"}, ANY),
        ({"$ref": "#/$defs/None"}, ANY),
        ({"anyOf": [{"anyOf": 3}]}, ANY),
        ({}, ANY),
        (True, ANY),
    ],
)
def test_the_type_of_an_argument(schema: Any, expected: str) -> None:
    assert type_of(schema, ROOT) == expected
