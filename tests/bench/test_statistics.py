# SPDX-License-Identifier: Apache-2.0
"""Medians with their spread; ratios only of what ran in the same turn."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.bench.statistics import Spread, paired_ratio, spread


def test_a_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)


def test_a_ratio_is_taken_turn_by_turn() -> None:
    # The machine got twice as slow after each turn: the ratio does not notice, the ratio of medians would.
    assert paired_ratio([8.0, 4.0, 2.0], [4.0, 2.0, 1.0]) == Spread(2.0, 2.0, 2.0)
    assert paired_ratio([8.0, 4.0, 3.0], [4.0, 2.0, 1.0]).median == 2.0


def test_turns_that_have_no_partner_are_an_error() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError):
        spread([])
