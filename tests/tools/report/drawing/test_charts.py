# SPDX-License-Identifier: Apache-2.0
"""Ticks are round, shapes are where their numbers say, and nothing is drawn of nothing."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.observe.account.accounting import is_work
from recipe.async_pipeline.tools.report.drawing.charts import (
    MAX_COLUMNS,
    Line,
    column_chart,
    figure,
    histogram,
    legend,
    line_chart,
    share_bar,
    stack,
    strip,
    thinned,
    ticks,
)
from recipe.async_pipeline.tools.report.drawing.series import Series
from recipe.async_pipeline.tools.report.drawing.wording import amount, colour_of, seconds
from tests.tools.report.pages import Page


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_are_few_evenly_spaced_and_cover_the_range(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 8
    assert found[0] <= low + 1e-6 * max(1.0, abs(low))
    assert found[-1] >= low + span - 1e-6 * max(1.0, abs(low + span))
    gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-3)


def test_ticks_are_round_numbers() -> None:
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(0, 437) == [0, 200, 400, 600]
    assert ticks(3, 3)[0] <= 3 <= ticks(3, 3)[-1]


def test_a_long_series_is_thinned_to_means() -> None:
    found = thinned(Series(x=list(range(10)), y=[float(n) for n in range(10)]), most=5)
    assert list(found.y) == [0.5, 2.5, 4.5, 6.5, 8.5]
    short = Series(x=[1], y=[2])
    assert thinned(short) is short


def test_a_line_passes_through_its_points_and_embeds_its_values() -> None:
    html = line_chart(
        "Reward",
        [Line(label="mean", series=Series(x=[1, 2, 3], y=[0.0, 1.0, 0.5]), colour="c-train")],
        x_label="step",
    )

    page = Page(html)
    drawn = next(attrs["d"] for attrs in page.all("path") if "line" in str(attrs["class"]))
    assert drawn == "M0.0 100.00L500.0 0.00L1000.0 50.00"
    data = json.loads(next(str(attrs["data-line"]) for attrs in page.all("div") if "data-line" in attrs))
    assert data["lines"] == [{"label": "mean", "x": [1, 2, 3], "y": ["0", "1", "0.5"]}]
    assert any("from 0 to 0.5, at most 1" in text for text in page.texts), (
        "the description for screen readers"
    )
    assert (
        line_chart("Reward", [Line(label="mean", series=Series(x=[], y=[]), colour="c")], x_label="step")
        == ""
    )


@pytest.mark.parametrize(
    "series", [Series(x=[1], y=[0.0]), Series(x=[1, 2], y=[3.0, 3.0]), Series(x=[5], y=[-1.5])]
)
def test_few_and_equal_values_are_drawn(series: Series) -> None:
    html = line_chart(
        "x",
        [Line(label="", series=series, colour="c"), Line(label="v", series=series, colour="c", dots=True)],
        x_label="step",
        steps=True,
    )
    assert "nan" not in html


def test_columns_have_the_height_of_their_parts_and_a_tooltip() -> None:
    html = column_chart(
        "t",
        [(1, {"a": 1.0, "b": 3.0}), (2, {"a": 2.0})],
        {"a": "c-train", "b": "c-logp idle"},
        {"a": "A", "b": "B"},
        x_label="step",
        text=seconds,
    )
    page = Page(html)
    heights = [(attrs["class"], attrs["height"]) for attrs in page.all("rect") if attrs["class"] != "hit"]
    assert heights == [("c-train", "25.00"), ("c-logp idle", "75.00"), ("c-train", "50.00")]
    assert [attrs["data-tip"] for attrs in page.all("g")] == [
        "step 1: 4 s\nA: 1 s\nB: 3 s",
        "step 2: 2 s\nA: 2 s",
    ]


def test_many_columns_are_averaged() -> None:
    html = column_chart(
        "t",
        [(float(n), {"a": float(n % 2)}) for n in range(1000)],
        {"a": "c"},
        {"a": "A"},
        x_label="step",
        text=amount,
    )
    assert len(Page(html).all("g")) <= MAX_COLUMNS
    assert "step 0 to 8 (mean)" in html


def test_a_bar_shows_every_share_and_labels_large_ones() -> None:
    page = Page(
        share_bar(
            [
                ("c-train", 0.9, "training: 90%"),
                ("c-sync idle", 0.1, "waiting: 10%"),
                ("c-none", 0.0, "nothing"),
            ],
            "pool train",
        )
    )
    assert [(attrs["class"], attrs["style"]) for attrs in page.all("b")] == [
        ("c-train", "width:90.000%"),
        ("c-sync idle", "width:10.000%"),
    ]
    assert page.texts == ["90%", "10%"]
    assert page.all("div")[0]["aria-label"] == "pool train"


def test_a_histogram_of_two_runs_has_a_column_for_each_lag_of_both() -> None:
    page = Page(
        histogram(
            "Lag",
            {"0": 0.25, "1": 0.75},
            colour="c-generate",
            other=({"1": 1.0, "2": 0.0}, "c-train"),
            x_label="lag",
        )
    )
    assert [attrs["style"] for attrs in page.all("i")] == [
        "height:25.0%",
        "height:0.0%",
        "height:75.0%",
        "height:100.0%",
        "height:0.0%",
        "height:0.0%",
    ]


def test_a_strip_is_paler_in_bins_with_partial_work() -> None:
    page = Page(strip([(0.0, 50.0), (75.0, 75.05)], "c-train", 0.0, 100.0))
    first, second = page.all("rect")
    assert first["x"] == "0.00" and float(str(first["width"])) == pytest.approx(500, abs=1)
    assert "opacity" not in first
    assert float(str(second["opacity"])) < 0.6


def test_a_stack_draws_work_below_waiting_and_fills_its_row() -> None:
    spans = [(0.0, 10.0, "compute_train"), (10.0, 30.0, "wait_generate"), (30.0, 40.0, "sync")]
    page = Page(stack(spans, colour_of, 0.0, 40.0, is_work))
    widths: dict[str, float] = {}
    for attrs in page.all("rect"):
        widths[str(attrs["class"])] = widths.get(str(attrs["class"]), 0.0) + float(str(attrs["width"]))
    assert widths == {
        "c-train": pytest.approx(250, abs=1),
        "c-generate idle": pytest.approx(500, abs=1),
        "c-sync": pytest.approx(250, abs=1),
    }

    both = Page(
        stack(
            [(0.0, 0.001, "compute_train"), (0.001, 0.002, "wait_generate"), (0.002, 1.0, "none")],
            colour_of,
            0.0,
            1.0,
            is_work,
        )
    )
    low, high = both.all("rect")[:2]
    assert (low["class"], high["class"]) == ("c-train", "c-generate idle"), "both spans are in the first bin"
    assert re.match(r"\d", str(high["y"]))
    assert float(str(high["y"])) < float(str(low["y"]))


def test_names_from_users_are_escaped() -> None:
    html = figure("<a> & b", legend([("c-train", "<script>")]), says="<i>")
    assert "<script>" not in html
    assert "&lt;a&gt; &amp; b" in html
