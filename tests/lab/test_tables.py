# SPDX-License-Identifier: Apache-2.0
"""Medians with their spread, ratios within one turn, percentiles, and tables of them."""

from __future__ import annotations

from collections import Counter

import pytest

from recipe.async_pipeline.lab.tables import (
    Spread,
    paired_ratio,
    percentile,
    render_spread,
    render_table,
    spread,
)


def test_spread_is_median_min_and_max() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)


def test_ratios_are_taken_turn_by_turn() -> None:
    # The machine becomes twice as slow after each turn, which does not affect paired ratios.
    assert paired_ratio([8.0, 4.0, 2.0], [4.0, 2.0, 1.0]) == Spread(2.0, 2.0, 2.0)
    assert paired_ratio([8.0, 4.0, 3.0], [4.0, 2.0, 1.0]).median == 2.0


def test_unequal_or_empty_sequences_are_an_error() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError):
        spread([])


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.99, 4.0), (0.25, 1.0), (1.0, 4.0)])
def test_a_percentile_is_the_smallest_value_that_the_share_does_not_exceed(
    share: float, value: float
) -> None:
    assert percentile(Counter([4.0, 1.0, 3.0, 2.0]), share) == value
    assert percentile({4.0: 10, 1.0: 10, 3.0: 10, 2.0: 10}, share) == value
    assert percentile({}, share) is None


def test_a_spread_is_shown_in_one_format_and_unit() -> None:
    assert render_spread(Spread(2.0, 1.0, 3.0), ".1f") == "2.0 [1.0 .. 3.0]"
    assert render_spread({"median": 0.002, "min": 0.001, "max": 0.003}, ".0f", 1e3) == "2 [1 .. 3]"
    assert render_spread(Spread(0.5, 0.25, 1.0), ".0%") == "50% [25% .. 100%]"


def test_a_table_has_as_many_cells_in_each_row() -> None:
    assert render_table(["a", "b"], [[1, "x"], [2, "y"]]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |"
    with pytest.raises(ValueError, match="a row of 2 columns must have as many cells, got 1"):
        render_table(["a", "b"], [["x"]])
