# SPDX-License-Identifier: Apache-2.0
"""Medians with their spread, and ratios within one turn."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.lab.bench.statistics import Spread, paired_ratio, spread


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
