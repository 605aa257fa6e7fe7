# SPDX-License-Identifier: Apache-2.0
"""Compare two runs in a report: their results, their settings and their use of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from markupsafe import Markup

from ...observe.table import percent
from .advice import advise
from .drawing.charts import Line, Text, figure, grid, legend, line_chart, share_bar
from .drawing.series import Series
from .drawing.wording import amount, colour_of, reason_in_words, seconds
from .figures.data import RunData, changed_settings
from .html_page import TEMPLATES, page, part
from .page import advice_list
from .sections import RUN_COLOURS, fates, freshness, learning, ordered

MAX_SETTINGS = 60


def compare_page(a: RunData, b: RunData) -> str:
    """Return the page of `async-pipeline report A B`."""
    runs = (a, b)
    sections = [
        ("figures", "Results", _figures(a, b)),
        ("settings", "Different settings", _settings(a, b)),
        ("devices", "Device-seconds", _devices(runs)),
        ("steps", "Step time", _steps(runs)),
        ("learning", "Learning", learning(runs)),
        ("freshness", "Age of samples", freshness(runs)),
        ("advice", "Advice for each run", _advice(runs)),
        ("samples", "Fates of groups", grid(fates(a, "A: "), fates(b, "B: "))),
    ]
    return page(
        f"{TEMPLATES}/compare.html",
        title=f"{a.name} against {b.name}",
        runs=[("AB"[n], RUN_COLOURS[n], run) for n, run in enumerate(runs)],
        missing=[f"{'AB'[n]}: {text}" for n, run in enumerate(runs) for text in run.missing],
        sections=sections,
    )


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """One figure of both runs."""

    name: str
    a: float | None
    b: float | None
    text: Text
    better: int = 0
    """1 if higher is better, -1 if lower is better, 0 if neither."""
    differs: Literal["by", "points", "versions"] = "by"
    """Unit of the change: relative to a, percentage points, or versions."""

    @property
    def change(self) -> str:
        """The change from a to b, as text."""
        assert self.a is not None and self.b is not None
        if self.differs == "points":
            return f"{100 * (self.b - self.a):+.0f} points"
        if self.differs == "versions":
            return f"{self.b - self.a:+.2f}"
        return f"{self.b / self.a - 1:+.0%}" if self.a else ""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or an empty string if neither applies."""
        assert self.a is not None and self.b is not None
        sign = (self.b > self.a) - (self.b < self.a)
        return "" if not self.better or not sign else "better" if sign == self.better else "worse"


def _known(a: RunData, b: RunData) -> list[_Figure]:
    time = f", {a.typical_time}" if a.typical_time == b.typical_time else ""
    found = [
        _Figure(
            name="Step time, median",
            a=_median(a.step_s[1:]),
            b=_median(b.step_s[1:]),
            text=seconds,
            better=-1,
        ),
        _Figure(
            name="Responses trained per second", a=a.samples_per_s, b=b.samples_per_s, text=amount, better=1
        ),
        _Figure(
            name=f"Overlap efficiency{time}",
            a=_of(a, "overlap_efficiency"),
            b=_of(b, "overlap_efficiency"),
            text=percent,
            better=1,
            differs="points",
        ),
        _Figure(
            name=f"Devices idle{time}",
            a=_of(a, "bubble_ratio"),
            b=_of(b, "bubble_ratio"),
            text=percent,
            better=-1,
            differs="points",
        ),
        _Figure(
            name="Lag, mean, versions",
            a=_mean(a.lag_mean),
            b=_mean(b.lag_mean),
            text=amount,
            better=-1,
            differs="versions",
        ),
        _Figure(name="Reward, last fifth", a=_last(a.reward), b=_last(b.reward), text=amount, better=1),
        _Figure(
            name="Response length, last fifth, tokens",
            a=_last(a.length_mean),
            b=_last(b.length_mean),
            text=amount,
        ),
        _Figure(name="Wall time", a=a.wall_s or None, b=b.wall_s or None, text=seconds),
    ]
    return [one for one in found if one.a is not None and one.b is not None]


def _figures(a: RunData, b: RunData) -> Markup:
    rows = []
    for one in _known(a, b):
        assert one.a is not None and one.b is not None
        change = part("verdict", one.change, one.verdict)
        rows.append((one.name, one.text(one.a), one.text(one.b), change))
    if not rows:
        return Markup()
    return figure(
        "Figures",
        part("table", ("figure", "A", "B", "B against A"), rows, ""),
        note="One run each: differences of a few per cent are within the noise.",
        wide=True,
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _mean(series: Series) -> float | None:
    return fmean(series.y) if series else None


def _last(series: Series) -> float | None:
    return fmean(series.y[-max(1, len(series.y) // 5) :]) if series else None


def _of(run: RunData, what: str) -> float | None:
    return float(getattr(run.typical, what)) if run.typical is not None and run.typical.steady_s else None


def _settings(a: RunData, b: RunData) -> Markup:
    if not a.config or not b.config:
        return part("paragraph", "Unknown: at least one run has no config.json.", file="sections")

    changed = changed_settings(a.config, b.config)
    if not changed:
        return part("paragraph", "Only names and paths differ.", file="sections")

    rows = [(part("code", key), x, y) for key, x, y in changed[:MAX_SETTINGS]]
    more = f"{len(changed) - MAX_SETTINGS} more are not shown." if len(changed) > MAX_SETTINGS else ""
    return figure(
        f"{len(changed)} settings",
        part("table", ("setting", "A", "B"), rows, "settings"),
        note=more,
        wide=True,
    )


def _devices(runs: Sequence[RunData]) -> Markup:
    figures, used = [], {}
    pools = list(dict.fromkeys(name for run in runs if run.accounting for name in run.accounting.pools))

    for pool in pools:
        bars = []
        for n, run in enumerate(runs):
            account = run.accounting.pools.get(pool) if run.accounting else None
            if account is None:
                bars.append((f"{'AB'[n]}: has no such pool", Markup()))
                continue

            steady = {reason: s for reason, s in account.seconds.items() if reason != "start_up"}
            parts = ordered(steady, sum(steady.values()))
            used.update({reason: colour_of(reason) for reason, _, _ in parts})

            cells = [
                (
                    colour_of(r),
                    share,
                    f"{'AB'[n]}: {reason_in_words(r)}: {percent(share)}, {seconds(s)} of devices",
                )
                for r, s, share in parts
            ]
            plural = "s" if account.devices != 1 else ""
            bars.append(
                (
                    f"{'AB'[n]}: {account.devices} device{plural}",
                    share_bar(cells, f"pool {pool} of {run.name}"),
                )
            )
        figures.append(figure(f"Pool {pool}", part("pool_bars", bars)))

    if not used:
        return Markup()
    charts = grid(*figures, lead="Since the first version was served. Solid is work; stripes are waiting.")
    return charts + legend([(colour, reason_in_words(reason)) for reason, colour in used.items()])


def _steps(runs: Sequence[RunData]) -> Markup:
    lines = [
        Line(
            label=f"{'AB'[n]}: {run.name}",
            series=Series(x=[float(i) for i in range(2, len(run.step_s) + 1)], y=run.step_s[1:]),
            colour=RUN_COLOURS[n],
            dashed=n == 1,
        )
        for n, run in enumerate(runs)
    ]
    return line_chart("Seconds of each step", lines, x_label="step", text=seconds, low=0.0)


def _advice(runs: Sequence[RunData]) -> Markup:
    return part(
        "advice_of_runs",
        [(f"{'AB'[n]}: {run.name}", advice_list(advise(run), run)) for n, run in enumerate(runs)],
        file="sections",
    )
