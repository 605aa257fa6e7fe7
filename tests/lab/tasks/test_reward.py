# SPDX-License-Identifier: Apache-2.0
"""The reward rule: only exact answers score, for any kind of malformed response."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.lab.tasks import reward


def score(solution: str, ground_truth: str = "146") -> float:
    return reward.compute_score("async_pipeline/addition", solution, ground_truth, {"index": 0})


def test_the_right_answer_scores_one() -> None:
    assert score("146") == 1.0


@pytest.mark.parametrize(
    "solution",
    [
        "",
        " ",
        "147",
        "14",
        "1466",
        "0146",
        " 146",
        "146 ",
        "146\n",
        "146=",
        "+146",
        "one",
        "1" * 11,
        "١٤٦",
        "\ufffd",
    ],
)
def test_anything_else_scores_zero(solution: str) -> None:
    assert score(solution) == 0.0


def test_digits_of_other_scripts_do_not_count_even_when_the_truth_has_them() -> None:
    assert score("١٤٦", "١٤٦") == 0.0


@given(st.integers(min_value=0, max_value=10**9), st.integers(min_value=0, max_value=10**9))
def test_only_an_equal_number_is_correct(written: int, truth: int) -> None:
    assert score(str(written), str(truth)) == float(written == truth)


@pytest.mark.slow
@given(st.text())
def test_the_score_is_a_float_for_any_text(solution: str) -> None:
    result = score(solution)
    assert type(result) is float
    assert result in (0.0, 1.0)


def test_it_accepts_the_keywords_that_verl_passes() -> None:
    result = reward.compute_score(
        data_source="x", solution_str="3", ground_truth="3", extra_info=None, reward_router_address="unused"
    )
    assert result == 1.0


def test_the_file_imports_the_standard_library_only() -> None:
    path = Path(reward.__file__)
    assert runpy.run_path(str(path))["compute_score"]("x", "3", "3") == 1.0
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names
