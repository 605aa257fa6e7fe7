# SPDX-License-Identifier: Apache-2.0
"""Draws follow their distribution."""

from __future__ import annotations

import numpy as np
import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.plan.distribution import (
    Histogram,
    Lognormal,
    from_normal,
    histogram_of,
    is_constant,
    largest,
    smallest,
)

Z = np.random.default_rng(0).standard_normal(100_000)


def test_a_number_is_a_constant() -> None:
    assert set(from_normal(3.0, Z[:5])) == {3.0}
    assert is_constant(3.0)


def test_a_lognormal_has_its_median_spread_and_cap() -> None:
    drawn = from_normal(Lognormal(median=100, sigma=1.0, cap=1600), Z)
    assert np.median(drawn) == pytest.approx(100, rel=0.02)
    assert np.log(drawn[drawn < 1600]).std() == pytest.approx(1.0, rel=0.02)
    assert drawn.max() == 1600


def test_a_histogram_has_its_frequencies() -> None:
    drawn = from_normal(Histogram(values=(1, 2, 5), weights=(1, 2, 1)), Z)
    shares = [float((drawn == value).mean()) for value in (1, 2, 5)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


def test_larger_draws_of_the_normal_are_larger_values() -> None:
    z = np.linspace(-9, 9, 1001)
    for of in (Lognormal(median=3, sigma=0.5, cap=9), Histogram(values=(1, 2, 5), weights=(1, 0, 1))):
        values = from_normal(of, z)
        assert (np.diff(values) >= 0).all()
        assert smallest(of) <= values[0] <= values[-1] <= largest(of)


def test_observed_values_become_a_histogram() -> None:
    assert histogram_of(np.array([4.0, 4.0])) == 4.0
    assert histogram_of(np.array([1.0, 2.0, 2.0])) == Histogram(values=(1.0, 2.0), weights=(1.0, 2.0))


def test_many_values_are_condensed_and_the_largest_is_kept() -> None:
    seen = np.exp(Z[:5000])
    found = histogram_of(seen, most=32)
    assert isinstance(found, Histogram)
    assert len(found.values) <= 32
    assert sum(found.weights) == 5000
    assert largest(found) == pytest.approx(seen.max(), rel=1e-5)
    mean = sum(v * w for v, w in zip(found.values, found.weights, strict=True)) / 5000
    assert mean == pytest.approx(seen.mean(), rel=0.02)


@pytest.mark.parametrize(("median", "sigma", "cap"), [(0, 1, 2), (3, 1, 2), (1, -1, 2)])
def test_impossible_lognormals_are_refused(median: float, sigma: float, cap: float) -> None:
    with pytest.raises(ConfigError, match="requires 0 < median <= cap and sigma >= 0"):
        Lognormal(median=median, sigma=sigma, cap=cap)


@pytest.mark.parametrize(
    ("values", "weights"), [((), ()), ((2, 1), (1, 1)), ((1, 2), (1,)), ((1, 2), (0, 0)), ((1, 2), (-1, 2))]
)
def test_impossible_histograms_are_refused(values: tuple[float, ...], weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="a histogram requires"):
        Histogram(values=values, weights=weights)
