# SPDX-License-Identifier: Apache-2.0
"""Scores: which values are one, and what is stored of one that is missing."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.core.groups.scores import Score, ScoreRule, unscored
from recipe.async_pipeline.errors import RewardError


@pytest.mark.parametrize(
    "value",
    [
        1,
        True,
        1.0,
        Decimal(1),
        Fraction(1),
        np.float16(1),
        np.float32(1),
        np.longdouble(1),
        np.int8(1),
        np.bool_(True),
        np.array(1),
        np.array([1.0]),
    ],
)
def test_a_score_may_be_a_number_of_any_library(value: Any) -> None:
    score = Score.of(value)
    assert (score.value, score.why) == (1.0, "") and type(score.value) is float


@pytest.mark.parametrize(
    "value",
    [None, "1", b"1", float("nan"), Decimal("inf"), Decimal("sNaN"), 1e39, -1e39, 10**400, 1j]
    + [np.complex64(1), np.array([1, 2]), np.array("1"), np.float64("nan"), [1], {}, object()],
)
def test_a_score_that_float32_cannot_hold_is_none(value: Any) -> None:
    score = Score.of(value)
    assert score.value is None and score.why.startswith("invalid: the score must be a finite number, got ")
    with pytest.raises(RewardError, match="must be a finite number"):
        score.number()


def test_a_number_that_only_float64_holds_is_named_as_such() -> None:
    assert Score.of(1e39).why.endswith("got 1e+39, which is beyond float32")


@pytest.mark.parametrize("on_failure", ["drop", "score"])
def test_a_row_without_a_score_looks_like_the_others(on_failure: str) -> None:
    rule = ScoreRule(on_failure, -1.0, names=["acc"])
    assert rule.row(Score(None, "died"), {}) == (-1.0, {"acc": -1.0, "unscored": "died"})
    assert rule.row(Score.of(2), {"speed": 3}) == (2.0, {"speed": 3, "unscored": ""})
    assert rule.row(Score(None, "died"), {}) == (-1.0, {"speed": -1.0, "unscored": "died"})


def test_a_row_that_is_stored_twice_keeps_its_reason() -> None:
    rule = ScoreRule("drop", -1.0)
    number, info = rule.row(Score(None, "died"), {})
    assert rule.row(Score.of(number), info) == (number, info)
    assert unscored(info) == "died" and not unscored({})


def test_a_missing_score_ends_the_run_by_its_reason() -> None:
    rule = ScoreRule("fail", -1.0)
    assert rule.number(Score.of(2)) == 2.0
    with pytest.raises(RewardError, match="died"):
        rule.row(Score(None, "died"), {})
