# SPDX-License-Identifier: Apache-2.0
"""verl's registered parser reads every spelling of a call, and nothing else as one."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest
from verl.experimental.agent_loop.tool_parser import ToolParser

from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
MARKS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>"]
START = "<|start|>assistant"
THOUGHT = f"{START}<|channel|>analysis<|message|>call to=functions.g?<|end|>"
SPELLINGS = [
    "<|channel|>commentary to=functions.f <|constrain|>json",
    "<|channel|>commentary to=functions.f<|constrain|>json",
    "<|channel|>commentary to=functions.f <|constrain|> json",
    "<|channel|>commentary to=functions.f json",
    "<|channel|>commentary to=functions.f",
    "<|channel|>analysis to=functions.f code",
    " to=functions.f<|channel|>commentary",
    " to=functions.f<|channel|>commentary json",
    " to=functions.f<|channel|>commentary <|constrain|>json",
    " to=functions.f <|channel|>commentary<|constrain|>json",
]


@pytest.fixture
def module(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.agent_loop.sessions.session_policy")


def calls_of(module: ModuleType, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return what a parser finds, as any agent loop asks for it."""
    assert ToolParser._registry["gpt-oss"] is module.HarmonyToolParser
    tokenizer: Any = make_tokenizer()
    tokenizer.add_tokens(MARKS, special_tokens=True)
    parser = ToolParser.get_tool_parser("gpt-oss", tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    content, calls = asyncio.run(parser.extract_tool_calls(ids))
    return content, [(one.name, one.arguments) for one in calls]


@pytest.mark.parametrize("begun", [START, ""], ids=["whole", "begun by the prompt"])
@pytest.mark.parametrize("header", SPELLINGS)
def test_all_spellings_of_a_call_are_read(module: ModuleType, header: str, begun: str) -> None:
    call = header + '<|message|>{"x": "a < b"}<|call|>'
    found = [("f", '{"x": "a < b"}')]
    assert calls_of(module, begun + call) == ("", found)
    assert calls_of(module, f"{THOUGHT}{START}{call}{START}{call}") == ("", found * 2)


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>final<|message|>write to=functions.f<|return|>",
        "<|channel|>commentary<|message|>I call functions.f<|end|>",
        '<|channel|>commentary to=functions.f json<|message|>{"x": 4',
        "no channels",
    ],
)
def test_what_is_no_call_is_none(module: ModuleType, text: str) -> None:
    assert calls_of(module, text) == (text, [])
