# SPDX-License-Identifier: Apache-2.0
"""A row applies under its condition, and its message has the path, the rule, the value and the remedy.
Configs that are refused, and the words, are in `refusals.txt`.
"""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.checks.refusals import (
    Refusal,
    Settings,
    any_of,
    must_be,
    must_be_off,
    must_be_on,
    must_be_one_of,
    must_be_positive,
    never,
    number_above,
    off,
    on,
    other_than,
    positive,
    refuse,
    whole,
    whole_or_none,
)
from recipe.async_pipeline.config.keys.translation import resolve
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig
from recipe.async_pipeline.config.paths import OWN, nested
from recipe.async_pipeline.errors import ConfigError
from tests.refusals import Refused, cases_of


@cases_of("config")
def test_a_config_is_refused(case: Refused) -> None:
    case.replay(lambda changes: resolve(nested(changes)))


@cases_of("knobs")
def test_knobs_are_refused(case: Refused) -> None:
    case.replay(lambda knobs: resolve(nested({f"{OWN}.{name}": value for name, value in knobs.items()})))


@pytest.mark.parametrize(
    ("allowed", "good", "bad"),
    [
        (any_of(1, None), [1, None], [2, "1"]),
        (other_than("fsdp"), ["fsdp2", None], ["fsdp"]),
        (never, [], [None, 1]),
        (off, [None, False, 0, ""], [True, "x"]),
        (on, [True, "x"], [None, False, 0, ""]),
        (whole, [-1, 0, 3], [None, True, 1.0, "1"]),
        (positive, [1, 3], [None, True, 0, -1, 1.5, "1"]),
        (whole_or_none, [None, 0, 3], [True, -1, 1.5, "1", float("nan")]),
        (number_above(1), [None, 1.5, 2], [1, True, "2", float("nan"), float("inf")]),
    ],
)
def test_what_keys_may_have(allowed: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not allowed(value)] == []
    assert [value for value in bad if allowed(value)] == []


ROWS = (
    Refusal("a.b", any_of(1), "must be 1 with a.c=<a.c>", "set it, or a.c=<.d>", when=lambda at: at["a.c"]),
    Refusal(".d", off, "must be off", "leave it out"),
    Refusal(f"{OWN}.staleness.max_lag", any_of(1), "must be 1", "set it"),
)


def test_a_row_refuses_under_its_condition() -> None:
    config = nested({"a.b": 2, "a.c": 7, "s.d": 0})
    with pytest.raises(ConfigError, match=r"^a\.b must be 1 with a\.c=7, got 2; set it, or a\.c=0$"):
        refuse(ROWS[:2], Settings(config, section="s"))
    refuse(ROWS[:1], Settings(config | {"a": {"b": 2}}, section="s"))


def test_each_key_is_named_once_and_all_are() -> None:
    twice = (*ROWS, Refusal(".d", off, "must be zero", "set it"))
    with pytest.raises(ConfigError) as caught:
        refuse(twice, Settings(nested({"a.b": 2, "a.c": 7, "s.d": 3}), section="s"))
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "a.b must be 1 with a.c=7",
        "s.d must be off",
        f"{OWN}.staleness.max_lag must be 1",
    ]


def test_a_value_that_a_row_cannot_read_hides_no_other() -> None:
    unreadable = Refusal("a.b", lambda value: value > 0, "must be > 0", "set it")
    with pytest.raises(ConfigError, match=r"^s\.d must be off, got 3; leave it out$"):
        refuse(
            (unreadable, *ROWS[1:]),
            Settings(nested({"a.b": "x", "s.d": 3}), AsyncPipelineConfig(), section="s"),
        )
    with pytest.raises(TypeError):
        refuse((unreadable, ROWS[1]), Settings(nested({"a.b": "x"}), section="s"))


def test_paths_may_be_below_a_section_or_be_knobs() -> None:
    with pytest.raises(ConfigError, match=r"^s\.d must be off, got 3; leave it out$"):
        refuse(ROWS[:2], Settings({"s": {"d": 3}}, section="s"))
    knobs = AsyncPipelineConfig.of({"strategy": "n_step_ahead", "staleness.max_lag": 2})
    with pytest.raises(ConfigError, match=r"max_lag must be 1, got 2; set it$"):
        refuse(ROWS, Settings({}, knobs, section="s"))


@pytest.mark.parametrize(
    ("row", "value", "words"),
    [
        (must_be("k", None, False, remedy="r", where="on it"), 3, "k must be None on it, got 3; r"),
        (must_be_one_of("k", ("a", "b"), "r"), "c", "k must be one of a, b, got 'c'; r"),
        (must_be_off("k", "r"), 1, "k must be False, got 1; r"),
        (must_be_on("k", "r", "with x"), None, "k must be True with x, got None; r"),
        (must_be_positive("k", "r"), 0, "k must be >= 1, got 0; r"),
    ],
)
def test_the_words_of_usual_rows(row: Refusal, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse([row], Settings({"k": value}))
    assert str(caught.value) == words
