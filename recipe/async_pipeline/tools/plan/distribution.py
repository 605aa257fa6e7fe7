# SPDX-License-Identifier: Apache-2.0
"""Distributions of a quantity: a constant, a capped lognormal, or a histogram from a run.

All are monotone functions of a standard normal variable; two quantities are correlated by correlating their
normal variables.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec

from ...errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_REACH, _POINTS = 8.0, 4097
"""Table of the normal distribution: from -reach to reach, and its number of points."""


class Lognormal(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="lognormal"
):
    """exp(N(ln median, sigma)), capped at `cap`."""

    median: float
    sigma: float
    cap: float

    def __post_init__(self) -> None:
        if not (0 < self.median <= self.cap and self.sigma >= 0):
            raise ConfigError(
                f"a lognormal requires 0 < median <= cap and sigma >= 0, got median={self.median:g} "
                f"sigma={self.sigma:g} cap={self.cap:g}; correct the profile"
            )


class Histogram(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="histogram"
):
    """Values and their weights."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.values, self.values[1:], strict=False))
        if not self.values or len(self.values) != len(self.weights) or not rising or self.values[0] < 0:
            raise ConfigError(
                f"a histogram requires rising values >= 0 and one weight per value, got {len(self.values)} "
                f"values and {len(self.weights)} weights; correct the profile"
            )
        if min(self.weights) < 0 or sum(self.weights) <= 0:
            raise ConfigError("a histogram requires weights >= 0, not all of them 0; correct the profile")


Distribution = float | Lognormal | Histogram
"""A plain number is a constant."""


def from_normal(of: Distribution, z: Floats) -> Floats:
    """Map draws of a standard normal variable to values of the distribution, of the same shape."""
    import numpy as np

    if isinstance(of, Lognormal):
        drawn: Floats = np.minimum(of.cap, of.median * np.exp(of.sigma * z))
        return drawn
    if isinstance(of, Histogram):
        grid, below = _normal_table()
        ends = np.cumsum(of.weights) / sum(of.weights)
        index = np.searchsorted(ends, np.interp(z, grid, below), side="right")
        values: Floats = np.asarray(of.values, dtype=np.float64)[np.minimum(index, len(of.values) - 1)]
        return values
    return np.full(z.shape, float(of))


def smallest(of: Distribution) -> float:
    """Return a lower bound of the values."""
    return 0.0 if isinstance(of, Lognormal) else of.values[0] if isinstance(of, Histogram) else float(of)


def largest(of: Distribution) -> float:
    """Return the largest possible value."""
    return of.cap if isinstance(of, Lognormal) else of.values[-1] if isinstance(of, Histogram) else float(of)


def is_constant(of: Distribution) -> bool:
    """Return whether all values are equal."""
    return not isinstance(of, Lognormal | Histogram)


def histogram_of(values: Floats, most: int = 64) -> Distribution:
    """Return the distribution of `values` with at most `most` distinct values.

    If there are more, each is the mean of the values that it replaces; the largest is exact.
    """
    import numpy as np

    seen, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    if len(seen) == 1:
        return float(seen[0])
    if len(seen) > most:
        ordered = np.sort(np.asarray(values, dtype=np.float64))
        parts = [part for part in np.array_split(ordered[:-1], most - 1) if len(part)]
        seen, inverse = np.unique([*(part.mean() for part in parts), ordered[-1]], return_inverse=True)
        counts = np.bincount(inverse, weights=[*(len(part) for part in parts), 1])
    return Histogram(values=tuple(float(f"{v:.6g}") for v in seen), weights=tuple(float(c) for c in counts))


@cache
def _normal_table() -> tuple[Floats, Floats]:
    import numpy as np

    grid = np.linspace(-_REACH, _REACH, _POINTS)
    return grid, np.array([NormalDist().cdf(float(z)) for z in grid])
