# SPDX-License-Identifier: Apache-2.0
"""What the step metrics of a run say about its episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..drawing.series import Series, series_of
from .run_reader import PREFIX


@dataclass(frozen=True, kw_only=True)
class EpisodeFigures:
    """What the steps of a run say about their episodes; empty for single responses."""

    success: Series = Series(x=(), y=())
    """Share of the episodes that ended by themselves with a reward above 0."""
    turns_mean: Series = Series(x=(), y=())
    turns_max: Series = Series(x=(), y=())
    model_s: Series = Series(x=(), y=())
    """Mean seconds of an episode that wait for the policy."""
    model_s_p95: Series = Series(x=(), y=())
    env_s: Series = Series(x=(), y=())
    """Mean seconds of an episode that do not."""
    env_s_p95: Series = Series(x=(), y=())
    gateway_ms_p95: Series = Series(x=(), y=())
    """What the gateway adds to a request, in ms."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """Episodes by how they ended, of all steps."""
    again: int = 0
    """Attempts that failed and were repeated."""


def episode_figures(rows: Sequence[Any]) -> EpisodeFigures:
    """Return the figures of a run. `rows`: its step metrics, with `step` and `data`."""
    prefix = f"{PREFIX}agentic/"
    ends: dict[str, int] = {}
    for row in rows:
        for name, value in row.data.items():
            if name.startswith(f"{prefix}end/") and value:
                end = name.removeprefix(f"{prefix}end/")
                ends[end] = ends.get(end, 0) + int(value)
    return EpisodeFigures(
        success=series_of(rows, f"{prefix}success"),
        turns_mean=series_of(rows, f"{prefix}turns/mean"),
        turns_max=series_of(rows, f"{prefix}turns/max"),
        model_s=series_of(rows, f"{prefix}model_s/mean"),
        model_s_p95=series_of(rows, f"{prefix}model_s/p95"),
        env_s=series_of(rows, f"{prefix}env_s/mean"),
        env_s_p95=series_of(rows, f"{prefix}env_s/p95"),
        gateway_ms_p95=series_of(rows, f"{prefix}gateway_ms_p95"),
        ends=ends,
        again=int(sum(series_of(rows, f"{prefix}again").y)),
    )
