# SPDX-License-Identifier: Apache-2.0
"""Sums of two lengths, and a teacher that asks for some and guesses others."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from recipe.async_pipeline.lab.tasks.calculator_task.calculator import (
    CALL,
    COST,
    CalculatorTask,
    CalculatorTeacher,
    call_of,
    result_of,
)
from recipe.async_pipeline.lab.tasks.calculator_task.calculator_reward import COST as REWARDED_COST
from recipe.async_pipeline.lab.tasks.calculator_task.calculator_reward import compute_score
from recipe.async_pipeline.lab.tasks.calculator_task.calculator_warmup import CALCULATOR_WARMUP
from recipe.async_pipeline.lab.tasks.task import Problem

TASK = CalculatorTask(num_train=200, num_val=50)
SHORT, LONG = Problem(12, 34), Problem(1234, 5678)


def test_half_of_the_sums_are_long_and_none_is_in_both_lists() -> None:
    train, val = TASK.problems(3)
    assert (len(train), len(val)) == (200, 50) and not set(train) & set(val)
    assert Counter(map(TASK.is_long, [*train, *val])) == {True: 125, False: 125}
    assert TASK.problems(3) == (train, val) != TASK.problems(4)


def test_a_call_is_the_whole_turn() -> None:
    call = CALL.fullmatch(call_of(LONG))
    assert call is not None and (call[1], call[2]) == ("1234", "5678")
    assert CALL.fullmatch("6912") is None and CALL.fullmatch("[1+2]3") is None
    assert result_of(1234, 5678) == "6912>"


def test_a_careful_teacher_asks_for_exactly_the_long_sums() -> None:
    teacher, rng = CalculatorTeacher(TASK), random.Random(0)
    long, short = ([teacher.show(one, rng, 0.0) for _ in range(400)] for one in (LONG, SHORT))
    assert all(one.calls and one.answer == "6912" for one in long)
    assert not any(one.calls for one in short)
    assert {one.answer for one in short} == {"46"}


def test_a_careless_teacher_guesses_long_sums_and_slips() -> None:
    teacher, rng = CalculatorTeacher(TASK), random.Random(0)
    shown = [teacher.show(LONG, rng, 0.2) for _ in range(400)]
    guessed = [one for one in shown if not one.calls]
    assert 0.4 < len(guessed) / 400 < 0.6
    assert sum(one.answer == "6912" for one in guessed) < 5
    right = [one.answer == "6912" for one in shown if one.calls]
    assert 0.3 < sum(right) / len(right) < 0.65
    asked = [teacher.show(SHORT, rng, 0.2).calls for _ in range(400)]
    assert 0.4 < sum(asked) / 400 < 0.6


def test_calls_alone_do_not_end_the_lessons() -> None:
    train, _ = TASK.problems(0)
    with_calls = sum(map(TASK.is_long, train)) / len(train)
    assert CALCULATOR_WARMUP.taught_accuracy > with_calls + 0.3


@pytest.mark.parametrize(
    ("said", "score", "calls"),
    [
        ("6912", 1.0, 0),
        ("6913", 0.0, 0),
        ("[1234+5678]\n6912>6912", 1.0 - COST, 1),
        ("[1234+5678]\n6912>6913", -COST, 1),
        ("[1234+5678]\n6912>", -COST, 1),
        ("[1234+5678", 0.0, 0),
        ("x6912", 0.0, 0),
        ("", 0.0, 0),
    ],
)
def test_the_score_is_the_answer_less_the_calls(said: str, score: float, calls: int) -> None:
    found = compute_score("", said, "6912")
    assert found == {"score": pytest.approx(score), "acc": float(score > 0.5), "calls": calls}
    assert COST == REWARDED_COST
