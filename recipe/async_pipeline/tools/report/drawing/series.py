# SPDX-License-Identifier: Apache-2.0
"""A series of values, and how to read one from the metrics of a run's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values y at positions x, which are steps or seconds."""

    x: Sequence[float]
    y: Sequence[float]

    def __bool__(self) -> bool:
        return len(self.x) > 0


def series_of(rows: Sequence[Any], name: str) -> Series:
    """Return a metric by step, where it is a number. `rows`: with `step` and `data`."""
    known = [(row.step, row.data[name]) for row in rows if isinstance(row.data.get(name), int | float)]
    return Series(x=[float(step) for step, _ in known], y=[float(value) for _, value in known])
