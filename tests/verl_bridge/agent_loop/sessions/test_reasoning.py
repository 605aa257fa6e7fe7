# SPDX-License-Identifier: Apache-2.0
"""The reasoning of a model is apart from its answer, in the way of its family."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from recipe.async_pipeline.verl_bridge.agent_loop.sessions.response_form import reasoning_of

pytestmark = pytest.mark.real_engine
HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"]


def tokenizer_with(*tokens: str, special: bool = False) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(tokens), special_tokens=special)
    return tokenizer


def split(tokenizer: Any, text: str, **more: Any) -> tuple[str, str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    reasoning, answer = reasoning_of(tokenizer, **more).split(ids)
    return reasoning, answer.text


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\n4", False, ("hm", "4")),
        ("hm</think>4", True, ("hm", "4")),
        ("hm, cut", True, ("hm, cut", "")),
        ("<think>cut", False, ("cut", "")),
        ("4", False, ("", "4")),
        ("a</think>b</think>c", True, ("a</think>b", "c")),
    ],
)
def test_tags(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split(tokenizer_with("<think>", "</think>"), text, opened_by_prompt=opened) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>add 40 and 2<|end|>"
            "<|start|>assistant<|channel|>final<|message|>42<|return|>",
            ("add 40 and 2", "42"),
        ),
        ("<|channel|>final<|message|>42", ("", "42")),
        ("<|channel|>analysis<|message|>cut", ("cut", "")),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"x": 4}<|call|>',
            ("a", ""),
        ),
        ("no channels", ("", "no channels")),
    ],
)
def test_channels(text: str, expected: tuple[str, str]) -> None:
    assert split(tokenizer_with(*HARMONY, special=True), text) == expected


def test_a_model_that_does_not_reason() -> None:
    assert split(tokenizer_with(), "a</think>b") == ("", "a</think>b")
