# SPDX-License-Identifier: Apache-2.0
"""Compute medians with their spread, and ratios of values of the same turn."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Spread(NamedTuple):
    """Median, smallest and largest of a few repeats."""

    median: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Return median, min and max. Raises ValueError if there are no values."""
    if not values:
        raise ValueError("a spread needs at least one value")
    return Spread(median(values), min(values), max(values))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of the ratios of values that were measured in the same turn.

    Raises ValueError if the sequences differ in length or are empty.
    """
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])
