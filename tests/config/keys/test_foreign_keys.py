# SPDX-License-Identifier: Apache-2.0
"""Rules of keys; keys that propose the same knob must agree, and the one that proposed it is named."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.keys.foreign_keys import (
    Draft,
    ForeignKey,
    Outcome,
    Takes,
    left_out,
    only,
    required,
    to,
)
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.translate.rules import by_hand, one_of


def test_keys_that_agree_share_a_knob() -> None:
    draft = Draft()
    draft.propose("strategy", "on_policy", "a")
    draft.propose("strategy", "on_policy", "b")
    assert (draft.values, draft.sources) == ({"strategy": "on_policy"}, {"strategy": "a"})


def test_keys_that_disagree_are_named() -> None:
    draft = Draft()
    draft.propose("strategy", "on_policy", "a")
    with pytest.raises(ConfigError, match="b asks for strategy=fully_async but a for on_policy; keep one"):
        draft.propose("strategy", "fully_async", "b")


def test_rules_that_depend_on_the_value() -> None:
    choose = one_of({"vllm": "v"}, "x", "y", otherwise="set x")
    assert choose("vllm", {}) == Outcome("set", {"x": "v", "y": "v"})
    assert choose("tgi", {}) == Outcome("by hand", text="set x")
    same = only(1, "as here", "not so here")
    assert (same(1, {}).kind, same(2, {}).kind) == ("nothing to do", "differs")
    assert by_hand("do it")(3, {}) == Outcome("by hand", text="do it")


def test_a_wrong_value_is_one_line_with_the_key() -> None:
    even = Takes(lambda value: value % 2 == 0, "even", "halve it")
    assert ForeignKey("a.b", to("x", takes=even)).apply(2, {}) == Outcome("set", {"x": 2})
    assert ForeignKey("a.b", required(1.0, "leave it")).apply(1, {}).overrides == {}
    for rule, value, words in (
        (to("x", takes=even), 3, "must be even, got 3; halve it"),
        (required(1.0, "leave it"), True, "must be 1.0 with this pipeline, got True; leave it"),
        (left_out("set c"), 1, "must be left out with this pipeline, got 1; set c"),
    ):
        with pytest.raises(ConfigError, match=f"^a.b {words}$"):
            ForeignKey("a.b", rule).apply(value, {})
