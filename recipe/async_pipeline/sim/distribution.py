# SPDX-License-Identifier: Apache-2.0
"""How a quantity is spread: a constant, a lognormal with a cap, or a histogram out of a run.

All are monotone functions of a standard normal variable, so that two quantities are correlated by correlating
those.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec

from ..errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_REACH, _POINTS = 8.0, 4097
"""The normal distribution's table: from -reach to reach, in so many points."""


class Lognormal(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="lognormal"
):
    """exp(N(ln median, sigma)), cut off at `cap`."""

    median: float
    sigma: float
    cap: float

    def __post_init__(self) -> None:
        if not (0 < self.median <= self.cap and self.sigma >= 0):
            raise ConfigError(
                f"a lognormal needs 0 < median <= cap and sigma >= 0, got median={self.median:g} "
                f"sigma={self.sigma:g} "
                f"cap={self.cap:g}; mend it in the profile"
            )


class Histogram(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="histogram"
):
    """Values and how often each was seen."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.values, self.values[1:], strict=False))
        if not self.values or len(self.values) != len(self.weights) or not rising or self.values[0] < 0:
            raise ConfigError(
                f"a histogram needs rising values >= 0 and a weight for each, got {len(self.values)} "
                "values and "
                f"{len(self.weights)} weights; mend it in the profile"
            )
        if min(self.weights) < 0 or sum(self.weights) <= 0:
            raise ConfigError("a histogram needs weights >= 0 that are not all 0; mend it in the profile")


Distribution = float | Lognormal | Histogram
"""A plain number is always that number."""


def from_normal(of: Distribution, z: Floats) -> Floats:
    """The values that belong to draws of a standard normal variable, of the same shape."""
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
    """No value is below this one."""
    return 0.0 if isinstance(of, Lognormal) else of.values[0] if isinstance(of, Histogram) else float(of)


def largest(of: Distribution) -> float:
    """No value is above this one."""
    return of.cap if isinstance(of, Lognormal) else of.values[-1] if isinstance(of, Histogram) else float(of)


def is_constant(of: Distribution) -> bool:
    return not isinstance(of, Lognormal | Histogram)


def histogram_of(values: Floats, most: int = 64) -> Distribution:
    """What was seen, in at most `most` values, each the mean of those that it stands for; the largest
    stays as it is.
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
