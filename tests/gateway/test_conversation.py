# SPDX-License-Identifier: Apache-2.0
"""Which messages are the same, although agents do not send back exactly what they received."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.gateway.conversation import Said, ToolCall, identity, parsed, tool_call


def assistant(content: Any, *calls: tuple[str, Any], **more: Any) -> dict[str, Any]:
    listed = [{"id": "x", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": content, "tool_calls": listed, **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (assistant(None), assistant("")),
        (assistant("yes"), assistant(" yes\n")),
        (assistant("<think>hm</think>yes"), assistant("yes")),
        (assistant("", ("f", '{"a": 1, "b": 2}')), assistant(None, ("f", {"b": 2, "a": 1}))),
        (assistant("", ("f", "{not json")), assistant("", ("f", "{not json"))),
        (assistant("", ("f", "")), assistant("", ("f", None))),
        ({"role": "tool", "content": "3", "tool_call_id": "a"}, {"role": "tool", "content": "3"}),
    ],
)
def test_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identity(one) == identity(other)
    assert hash(identity(one)) == hash(identity(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (assistant("yes"), assistant("no")),
        (assistant("yes"), {"role": "user", "content": "yes"}),
        (assistant("yes"), assistant("yes", ("f", "{}"))),
        (assistant("", ("f", '{"a": 1}')), assistant("", ("f", '{"a": 2}'))),
        (assistant("", ("f", "{}")), assistant("", ("g", "{}"))),
        ({"role": "user", "content": "yes"}, {"role": "user", "content": "yes "}),
    ],
)
def test_not_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identity(one) != identity(other)


def test_a_turn_as_a_message_is_the_same_as_what_the_agent_sends_back() -> None:
    said = Said("calling", (ToolCall("call_1", "add", '{"x": 1}'), ToolCall("call_2", "bad", "{oops")))
    message = said.as_message()
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}, "as chat templates expect it"
    assert message["tool_calls"][1]["function"]["arguments"] == "{oops"
    returned = assistant("calling", ("add", '{"x":1}'), ("bad", "{oops"))
    assert identity(message) == identity(returned)
    assert "tool_calls" not in Said("plain").as_message()


@pytest.mark.parametrize(("text", "value"), [('{"a": 1}', {"a": 1}), ("[1]", "[1]"), ("", ""), ("{", "{")])
def test_arguments(text: str, value: Any) -> None:
    assert parsed(text) == value


def test_half_a_character_is_replaced() -> None:
    assert parsed(r'{"\ud83d": ["a\udc00b", "\ud83d\ude00"]}') == {"\ufffd": ["a\ufffdb", "\U0001f600"]}
    assert tool_call("\ud83d", '{"x": "\ud83d"}')[1:] == ("\ufffd", '{"x": "\ufffd"}')


def test_arguments_that_are_too_deep_stay_text() -> None:
    deep = '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert parsed(deep) == deep
