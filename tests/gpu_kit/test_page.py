# SPDX-License-Identifier: Apache-2.0
"""The report says what ran, what failed and what did not run."""

from __future__ import annotations

import json

from recipe.async_pipeline.gpu_kit.page import as_json, in_words, report_page
from recipe.async_pipeline.gpu_kit.steps import FAILED, NOT_RUN, PASSED, Result

RESULTS = [
    Result(name="copies", shows="speed", status=PASSED, seconds=8.0, figures={"commit, ms": 1.5}),
    Result(name="delivery", shows="bits", status=FAILED, seconds=2.0, detail="<CUDA error>"),
    Result(name="job", shows="a run", status=NOT_RUN, detail="vllm is not installed"),
]


def test_the_counts_are_in_words() -> None:
    assert in_words(RESULTS) == "1 passed, 1 failed, 1 not run"


def test_the_page_has_figures_and_escaped_errors() -> None:
    html = report_page({"cpu": "a & b", "vllm": None}, "cuda", RESULTS)
    assert "copies: passed in 8 s" in html and "commit, ms</th><td>1.5" in html
    assert "delivery: failed" in html and "&lt;CUDA error&gt;" in html and "<CUDA error>" not in html
    assert "vllm is not installed" in html and "1 passed, 1 failed, 1 not run" in html
    assert "a &amp; b" in html and "vllm None" not in html


def test_the_json_has_all_of_it() -> None:
    found = json.loads(json.dumps(as_json({"cores": 2}, "cuda", RESULTS)))
    assert (found["passed"], found["failed"], found["not_run"]) == (1, 1, 1)
    assert found["steps"][0]["figures"] == {"commit, ms": 1.5}
    assert (found["machine"], found["device"]) == ({"cores": 2}, "cuda")
