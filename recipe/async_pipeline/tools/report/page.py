# SPDX-License-Identifier: Apache-2.0
"""Render the report of one run as a self-contained page: no network access, no library in the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import NamedTuple

from markupsafe import Markup

from ...observe.table import percent
from .advice import FEW_STEPS, advise
from .advice_model import Advice
from .drawing.episode_charts import episodes
from .drawing.pictures import pictures
from .drawing.timeline import timeline
from .drawing.wording import amount, seconds
from .figures.data import RunData
from .html_page import TEMPLATES, page, part
from .sections import device_seconds, fates, freshness, learning, publications, queues, step_chart


class Tile(NamedTuple):
    """A main figure of a run."""

    number: str
    meaning: str
    unit: str = ""

    @property
    def text(self) -> str:
        return f"{self.number} {self.unit}".rstrip()


class LiveParts(NamedTuple):
    """What the page of a run has while a server renews it."""

    script: Markup
    links: Sequence[tuple[str, str]]
    """Addresses and their texts."""
    alarms: Sequence[str]
    written: str
    """When the run wrote its files."""


def run_page(run: RunData, parts: LiveParts | None = None) -> str:
    """Return the report of one run."""
    sections = [
        ("advice", "What to change", advice_list(advise(run), run)),
        ("timeline", "Timeline", timeline(run)),
        ("devices", "Device-seconds", device_seconds(run)),
        ("steps", "Critical stages", step_chart(run)),
        ("learning", "Learning", learning([run])),
        ("episodes", "Episodes", episodes(run.episodes)),
        ("pictures", "Pictures", pictures(run.pictures, run.mismatch)),
        ("freshness", "Age of samples", freshness([run])),
        ("queues", "Groups in flight", queues(run)),
        ("weights", "Weight updates", publications(run)),
        ("samples", "Fates of groups", fates(run)),
    ]
    return page(
        f"{TEMPLATES}/run.html",
        title=f"{run.name}: report",
        run=run,
        tiles=figures_of(run),
        sections=sections,
        parts=parts,
        **({} if parts is None else {"live": parts.script}),
    )


def figures_of(run: RunData) -> Mapping[str, Tile]:
    """Return the main figures that the run provides, by heading."""
    found: dict[str, Tile] = {}
    if run.step_s:
        steps = run.step_s[1:] or run.step_s
        spread = (
            f"median; 10th to 90th percentile {seconds(_decile(steps, 0))} to {seconds(_decile(steps, 8))}"
        )
        found["Step time"] = Tile(seconds(median(steps)), spread)

    if run.samples_per_s:
        found["Throughput"] = Tile(
            amount(run.samples_per_s), "responses trained, without the first step", "samples/s"
        )

    if run.steps and run.typical is not None and run.typical.steady_s:
        found["Overlap efficiency"] = Tile(
            percent(run.typical.overlap_efficiency),
            f"of the fastest possible schedule on these pools, {run.typical_time}",
        )
        found["Devices idle"] = Tile(
            percent(run.typical.bubble_ratio), f"of device-seconds, {run.typical_time}"
        )

    if run.lag_mean:
        found["Lag"] = Tile(
            amount(fmean(run.lag_mean.y)),
            f"versions on average; at most {max(run.lag_max.y, default=0):.0f} of {run.max_lag} allowed",
        )

    if run.reward:
        fifth = max(1, len(run.reward.y) // 5)
        found["Reward"] = Tile(
            f"{amount(fmean(run.reward.y[:fifth]))} → {amount(fmean(run.reward.y[-fifth:]))}",
            "means over the first and last fifth of the steps",
        )
    return found


def _decile(values: Sequence[float], which: int) -> float:
    return quantiles(values, n=10, method="inclusive")[which] if len(values) > 1 else values[0]


def advice_list(advice: Sequence[Advice], run: RunData) -> Markup:
    """Return the advice as a list, or a paragraph with the reason for its absence."""
    if run.accounting is None or run.typical is None:
        missing = "Advice needs events.jsonl."
    elif len(run.accounting.steps) < FEW_STEPS:
        missing = f"Advice needs {FEW_STEPS} steps; this run has {len(run.accounting.steps)}."
    else:
        return part("advice_list", advice, run.typical.overlap_efficiency, file="sections")
    return part("paragraph", missing, file="sections")
