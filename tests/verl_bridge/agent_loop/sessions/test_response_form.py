# SPDX-License-Identifier: Apache-2.0
"""Forms of answers as engines take them; `e2e/test_engine.py` has engines write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.turns import ANY_TOOL, Form
from recipe.async_pipeline.verl_bridge.agent_loop.sessions.response_form import structured

SCHEMA = {"type": "object"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("a", "b")]


def tag(form: Form) -> dict[str, Any]:
    found = json.loads(structured(form, "hermes")["structural_tag"])
    assert found["type"] == "structural_tag"
    written: dict[str, Any] = found["format"]
    return written


@pytest.mark.parametrize("tool_format", [None, "hermes", "qwen3_coder"])
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
def test_calls_in_another_format_are_refused(form: Form, field: str) -> None:
    with pytest.raises(RequestRefused, match=rf"^{field}.*format=hermes only, got qwen3_coder; leave"):
        structured(form, "qwen3_coder")
