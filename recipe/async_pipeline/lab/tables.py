# SPDX-License-Identifier: Apache-2.0
"""Reduce repeated measurements to figures, and show figures as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def percentile(counts: Mapping[float, int], share: float) -> float | None:
    """Return the smallest value that this share of the values does not exceed, or None without values.

    `counts`: how often each value was measured.
    """
    wanted, seen = share * sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    return None


def render_spread(values: Spread | Mapping[str, float], spec: str, factor: float = 1.0) -> str:
    """Return `median [min .. max]`, each times `factor` and in the format `spec`."""
    found = values if isinstance(values, Spread) else Spread(**values)
    middle, low, high = (format(value * factor, spec) for value in found)
    return f"{middle} [{low} .. {high}]"


def render_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. Raises ValueError if a row has more or fewer cells than the header."""
    lines = [header, ["---"] * len(header)]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(header)} columns must have as many cells, got {len(row)}: {row}")
        lines.append([str(cell) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
