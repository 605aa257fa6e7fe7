# SPDX-License-Identifier: Apache-2.0
"""The report says what ran, what failed and what did not run."""

from __future__ import annotations

import json

import pytest

from recipe.async_pipeline.lab.gpu_kit.page import as_json, in_words, report_page, rounded
from recipe.async_pipeline.lab.gpu_kit.steps import FAILED, NOT_RUN, PASSED, Figure, Result

FIGURES = (Figure("port", "6379"), Figure("port", "8265"), Figure("commit, ms", 1.23456, "until it <serves>"))
RESULTS = [
    Result(name="copies", shows="speed", status=PASSED, seconds=8.0, figures=FIGURES, written=[0.00123456]),
    Result(name="delivery", shows="bits", status=FAILED, seconds=2.0, detail="<CUDA error>"),
    Result(name="job", shows="a run", status=NOT_RUN, detail="vllm is not installed"),
]


def test_the_counts_are_in_words() -> None:
    assert in_words(RESULTS) == "1 passed, 1 failed, 1 not run"


def test_the_page_has_figures_and_escaped_errors() -> None:
    html = report_page({"cpu": "a & b", "vllm": None}, "cuda", RESULTS)
    assert (
        "copies: passed after 8 s" in html
        and "commit, ms</th><td>1.23</td><td>until it &lt;serves&gt;</td>" in html
    )
    assert (
        "delivery: failed after 2 s" in html and "&lt;CUDA error&gt;" in html and "<CUDA error>" not in html
    )
    assert "vllm is not installed" in html and "1 passed, 1 failed, 1 not run" in html
    assert "a &amp; b" in html and "vllm None" not in html


def test_the_json_has_all_of_it() -> None:
    found = json.loads(json.dumps(as_json({"cores": 2}, "cuda", RESULTS)))
    assert (found["passed"], found["failed"], found["not_run"]) == (1, 1, 1)
    assert found["steps"][0]["figures"] == [
        {"name": "port", "value": "6379", "meaning": ""},
        {"name": "port", "value": "8265", "meaning": ""},
        {"name": "commit, ms", "value": 1.23456, "meaning": "until it <serves>"},
    ]
    assert found["steps"][0]["written"] == [0.00123456]
    assert (found["machine"], found["device"]) == ({"cores": 2}, "cuda")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.005225946999416919, "0.00523"),
        (1.5549, "1.55"),
        (12345.6, "12,300"),
        (7.4e-8, "7.4e-08"),
        (0.0, "0"),
        (float("nan"), "nan"),
        (20480, "20480"),
        ("v3: no", "v3: no"),
    ],
)
def test_a_reader_gets_three_digits(value: object, shown: str) -> None:
    assert rounded(value) == shown
