# SPDX-License-Identifier: Apache-2.0
"""Seeded latencies are repeatable, bounded and lognormal."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.bench.inputs.waits import LognormalWait

TOOL = LognormalWait(median=0.4, sigma=0.9, cap=4.0)


@pytest.mark.slow
@given(st.integers(), st.lists(st.one_of(st.integers(), st.text()), max_size=4))
def test_equal_requests_have_equal_latencies(seed: int, key: list[object]) -> None:
    value = TOOL.draw(seed, *key)
    assert value == TOOL.draw(seed, *key)
    assert 0 < value <= TOOL.cap


def test_the_draws_are_lognormal() -> None:
    draws = [TOOL.draw(1, "tool", i) for i in range(4000)]
    assert median(draws) == pytest.approx(0.4, rel=0.05)
    # 0.4 * exp(0.9) is one sigma above the median: 84 % are below it.
    assert sum(d < 0.4 * 2.4596 for d in draws) / len(draws) == pytest.approx(0.841, abs=0.02)
    assert max(draws) == TOOL.cap


def test_seeds_and_requests_have_different_latencies() -> None:
    assert (
        len({TOOL.draw(seed, "tool", i, turn) for seed in range(3) for i in range(5) for turn in range(2)})
        == 30
    )


def test_without_spread_every_latency_is_the_median() -> None:
    assert LognormalWait(median=2.0, sigma=0.0, cap=3.0).draw(1, "x") == pytest.approx(2.0)


@pytest.mark.parametrize("values", [(0, 1, 1), (-1, 1, 1), (2, 1, 1), (1, -0.1, 2)])
def test_invalid_parameters_are_rejected(values: tuple[float, float, float]) -> None:
    middle, sigma, cap = values
    with pytest.raises(ConfigError, match="0 < median <= cap"):
        LognormalWait(median=middle, sigma=sigma, cap=cap)
