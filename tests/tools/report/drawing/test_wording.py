# SPDX-License-Identifier: Apache-2.0
"""Reasons have a description, numbers have units, and every colour is in the style sheet."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from recipe.async_pipeline.core.graph import GRAPH
from recipe.async_pipeline.observe.account.accounting import is_work
from recipe.async_pipeline.observe.table import percent
from recipe.async_pipeline.tools.report.drawing.wording import (
    ROLE_COLOURS,
    amount,
    colour_of,
    number_of_bytes,
    reason_in_words,
    seconds,
)

REASONS = [f"{kind}_{role}" for kind in ("compute", "wait", "lease") for role in (*GRAPH, "audit")] + [
    "sync",
    "validation",
    "wait_environment",
    "start_up",
    "none",
]
STYLE = files("recipe.async_pipeline.tools.report").joinpath("report.css").read_text(encoding="utf-8")


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_a_description_and_a_colour(reason: str) -> None:
    words = reason_in_words(reason)
    assert words
    assert words != reason or reason in ("validation",)
    colour = colour_of(reason).split()[0]
    assert re.search(rf"\.{colour} {{ --c: var\(--\w+\)", STYLE), f"{colour} has no colour"
    assert ("idle" in colour_of(reason).split()) != is_work(reason), "only waiting is striped"


def test_every_stage_has_a_distinct_colour() -> None:
    assert set(ROLE_COLOURS) == set(GRAPH)
    assert len(set(ROLE_COLOURS.values())) == len(ROLE_COLOURS)


def test_colours_are_defined_for_light_and_dark() -> None:
    light, dark = (
        set(re.findall(r"(--\w+):", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    )
    assert dark <= light
    assert {f"--{name}" for name in re.findall(r"\.c-\w+ \{ --c: var\(--(\w+)\)", STYLE)} <= dark


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (0.25, "0.25 s"),
        (4.1, "4.1 s"),
        (30.0, "30 s"),
        (123.4, "123 s"),
        (436, "7.3 min"),
        (1000, "17 min"),
        (9000, "2.5 h"),
    ],
)
def test_seconds_have_a_fitting_unit(value: float, text: str) -> None:
    assert seconds(value) == text


def test_amounts_bytes_and_percentages() -> None:
    assert [amount(v) for v in (0, 0.5, 19.04, 1234.5, 0.0001)] == ["0", "0.5", "19", "1,234", "1.0e-04"]
    assert [number_of_bytes(v) for v in (12, 2_366_976, 1.2e9, 3e15)] == [
        "12 B",
        "2.37 MB",
        "1.2 GB",
        "3e+03 TB",
    ]
    assert [percent(v) for v in (0, 0.004, 0.0994, 0.38, 1)] == ["0%", "0.4%", "9.9%", "38%", "100%"]
