# SPDX-License-Identifier: Apache-2.0
"""The arithmetic: every sum occurs once, with the correct answer, and the split depends on the seed alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.task import Problem, TaskSpec, careless_answer, split_problems

OPERANDS = st.integers(min_value=0, max_value=10**6)


@given(OPERANDS, OPERANDS)
def test_the_answer_is_the_sum_of_the_operands(left: int, right: int) -> None:
    problem = Problem(left, right)
    shown_left, shown_right = problem.prompt.removesuffix("=").split("+")
    assert int(problem.answer) == int(shown_left) + int(shown_right)
    assert problem.prompt.endswith("=")


@given(OPERANDS, OPERANDS, st.integers(min_value=0), st.floats(min_value=0, max_value=1))
def test_a_careless_answer_has_as_many_digits(left: int, right: int, seed: int, slip_rate: float) -> None:
    problem = Problem(left, right)
    answer = careless_answer(problem, random.Random(seed), slip_rate)
    assert answer.isdigit()
    assert len(answer) == len(problem.answer)


@given(OPERANDS, OPERANDS)
def test_a_slip_rate_of_zero_gives_the_right_answer(left: int, right: int) -> None:
    problem = Problem(left, right)
    assert careless_answer(problem, random.Random(0), 0.0) == problem.answer


def test_slips_occur_at_the_requested_rate() -> None:
    rng = random.Random(0)
    problem = Problem(44, 0)
    kept = sum(careless_answer(problem, rng, 0.25).count("4") for _ in range(4000)) / 8000
    # A slip writes the right digit one time in ten; five standard errors of 0.0047.
    assert kept == pytest.approx(1 - 0.25 * 0.9, abs=0.025)


@given(
    min_operand=st.integers(min_value=0, max_value=5),
    span=st.integers(min_value=1, max_value=8),
    seed=st.integers(),
    data=st.data(),
)
def test_every_sum_is_in_exactly_one_split(
    min_operand: int, span: int, seed: int, data: st.DataObject
) -> None:
    num_problems = (span + 1) ** 2
    num_val = data.draw(st.integers(min_value=1, max_value=num_problems - 1))
    spec = TaskSpec(min_operand=min_operand, max_operand=min_operand + span, num_val=num_val)
    split = split_problems(spec, seed)
    operands = range(min_operand, min_operand + span + 1)
    assert sorted(split.train + split.val) == [
        Problem(left, right) for left in operands for right in operands
    ]
    assert len(split.val) == num_val


@pytest.mark.slow
def test_the_seed_determines_the_order() -> None:
    spec = TaskSpec()
    assert split_problems(spec, 1) == split_problems(spec, 1)
    assert split_problems(spec, 1) != split_problems(spec, 2)


@pytest.mark.parametrize(
    ("min_operand", "max_operand", "num_val"),
    [(5, 5, 1), (-1, 5, 1), (7, 5, 1), (0, 2, 0), (0, 2, 9)],
)
def test_an_impossible_task_is_refused(min_operand: int, max_operand: int, num_val: int) -> None:
    with pytest.raises(ConfigError, match="task"):
        TaskSpec(min_operand=min_operand, max_operand=max_operand, num_val=num_val)
