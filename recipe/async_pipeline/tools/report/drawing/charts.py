# SPDX-License-Identifier: Apache-2.0
"""Draw the charts of a report as HTML and inline SVG whose text keeps its size at any width.

Shapes go into an SVG that stretches with the page; ticks and labels are HTML, positioned in per cent. Each
chart is a figure with a title and a text description for screen readers. Text and labels are filled into
templates/parts.html, which escapes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup, escape

from ....observe.table import percent
from ..figures.data import Span
from ..html_page import part
from .series import Series
from .wording import amount

WIDTH, HEIGHT = 1000.0, 100.0
"""Size of each SVG in its view box units."""
MAX_POINTS = 600
"""Points of a line and bins of a timeline; a screen does not resolve more."""
MAX_COLUMNS = 120
Text = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart."""

    label: str
    series: Series
    colour: str
    dashed: bool = False
    dots: bool = False
    """Draw points instead of a line, for few values."""


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return about `about` round numbers that cover the range from `low` to `high`."""
    largest = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * largest > 1e-300 else largest if largest > 1e-300 else 1.0
    raw = span / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return [round(n * step, 12) for n in range(first, last + 1)]


def thinned(series: Series, most: int = MAX_POINTS) -> Series:
    """Return a series of at most `most` points, each the mean of consecutive points."""
    each = -(-len(series.x) // most)
    if each <= 1:
        return series

    parts = [slice(i, i + each) for i in range(0, len(series.x), each)]
    mean = [(sum(series.x[p]) / len(series.x[p]), sum(series.y[p]) / len(series.y[p])) for p in parts]
    return Series(x=[x for x, _ in mean], y=[y for _, y in mean])


def figure(title: str, body: Markup, *, says: str = "", note: str = "", wide: bool = False) -> Markup:
    """Return a titled figure; `says` is its description for screen readers, `note` a visible remark."""
    return part("figure", title, body, says, note, wide)


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Return a legend of entries (CSS class of the colour, text)."""
    return part("legend", entries)


def grid(*charts: Markup, lead: str = "") -> Markup:
    """Return charts next to each other, or an empty text if all are empty."""
    return part("grid", charts, lead) if any(charts) else Markup()


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    text: Text = amount,
    low: float | None = None,
    high: float | None = None,
    note: str = "",
    steps: bool = False,
) -> Markup:
    """Return a chart of lines over a common x, or an empty string without data.

    `text` formats a value of y; `steps` holds each value until the next.
    """
    shown = [line for line in lines if line.series]
    if not shown:
        return Markup()

    xs = [x for line in shown for x in (line.series.x[0], line.series.x[-1])]
    ys = [y for line in shown for y in line.series.y]
    marks = ticks(min(ys) if low is None else low, max(ys) if high is None else max(high, *ys))
    left, right, bottom, top = min(xs), max(xs), marks[0], marks[-1]
    reach = (right - left) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - left) / reach * WIDTH, HEIGHT - (y - bottom) / (top - bottom) * HEIGHT

    paths, data = [], []
    for line in shown:
        series = line.series if line.dots else thinned(line.series)
        points = [place(x, y) for x, y in zip(series.x, series.y, strict=True)]
        paths.append(
            f'<path class="{"dots" if line.dots else "line"}{" dashed" if line.dashed else ""} '
            f'{line.colour}" d="{_path(points, line.dots, steps)}"/>'
        )
        data.append(
            {"label": line.label, "x": [round(x, 4) for x in series.x], "y": [text(y) for y in series.y]}
        )

    shapes = [f'<path class="grid" d="M0 {place(left, y)[1]:.2f}H{WIDTH:.0f}"/>' for y in marks] + paths
    body = _plot(
        shapes,
        _Axes(marks=marks, across=ticks(left, right, 4), left=left, right=right, x_label=x_label, text=text),
        title,
        {"left": left, "right": right, "xLabel": x_label, "lines": data},
    )

    key = [
        (line.colour + (" dashed" if line.dashed else "") + (" dot" if line.dots else ""), line.label)
        for line in shown
    ]
    says = "; ".join(
        f"{line.label}: from {text(line.series.y[0])} to {text(line.series.y[-1])}, at most "
        f"{text(max(line.series.y))}"
        for line in shown
    )
    return figure(
        title, body + (legend(key) if len(shown) > 1 else ""), says=f"Over {x_label}. {says}.", note=note
    )


def _path(points: Sequence[tuple[float, float]], dots: bool, steps: bool) -> str:
    if dots:
        return "".join(f"M{x:.1f} {y:.2f}h.01" for x, y in points)
    first = f"M{points[0][0]:.1f} {points[0][1]:.2f}"
    return (
        first
        + "".join(f"H{x:.1f}V{y:.2f}" if steps else f"L{x:.1f} {y:.2f}" for x, y in points[1:])
        + ("h.01" if len(points) == 1 else "")
    )


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """The axes of a chart."""

    marks: Sequence[float]
    """Ticks of y; the first and the last are the ends."""
    across: Sequence[float]
    """Ticks of x; the ones outside of the chart are not drawn."""
    left: float
    right: float
    x_label: str
    text: Text
    """Formats a value of y."""

    def ups(self) -> list[tuple[str, str]]:
        bottom, top = self.marks[0], self.marks[-1]
        return [(f"{(y - bottom) / (top - bottom):.2%}", self.text(y)) for y in self.marks]

    def downs(self) -> list[tuple[str, str]]:
        return tick_places(self.across, self.left, self.right)


def tick_places(across: Sequence[float], left: float, right: float) -> list[tuple[str, str]]:
    """Return (place, text) of the ticks from `left` to `right`."""
    reach = (right - left) or 1.0
    return [(f"{(x - left) / reach:.2%}", f"{x:,.6g}") for x in across if left <= x <= right]


def _plot(shapes: Sequence[str], axes: _Axes, title: str, data: Mapping[str, object] | None = None) -> Markup:
    """`data`: what the page's script reads out at the cursor."""
    live = json.dumps(data) if data else ""
    return part("plot", Markup("".join(shapes)), axes.ups(), axes.downs(), axes.x_label, title, live)


def column_chart(
    title: str,
    columns: Sequence[tuple[float, Mapping[str, float]]],
    colours: Mapping[str, str],
    labels: Mapping[str, str],
    *,
    x_label: str,
    text: Text,
    note: str = "",
) -> Markup:
    """Return a chart of stacked columns (position, parts), averaged in bins if there are many.

    Returns an empty string without columns.
    """
    if not columns:
        return Markup()

    each = -(-len(columns) // MAX_COLUMNS)
    bins = [columns[i : i + each] for i in range(0, len(columns), each)]
    stacks = [
        ({name: sum(c[1].get(name, 0.0) for c in found) / len(found) for name in colours}, found)
        for found in bins
    ]
    marks = ticks(0.0, max(sum(parts.values()) for parts, _ in stacks) or 1.0)

    width, shapes = WIDTH / len(stacks), []
    for place, (parts, found) in enumerate(stacks):
        base = HEIGHT
        name = f"{found[0][0]:.6g}" + (f" to {found[-1][0]:.6g} (mean)" if len(found) > 1 else "")

        tip = "\n".join(
            [
                f"{x_label} {name}: {text(sum(parts.values()))}",
                *(f"{labels[p]}: {text(v)}" for p, v in parts.items() if v > 0),
            ]
        )

        rects = ""
        for reason, value in parts.items():
            height = value / marks[-1] * HEIGHT
            base -= height
            if height > 0.05:
                rects += (
                    f'<rect class="{colours[reason]}" x="{place * width + width * 0.06:.2f}" '
                    f'y="{base:.2f}" width="{width * 0.88:.2f}" height="{height:.2f}"/>'
                )

        shapes.append(
            f'<g data-tip="{escape(tip)}"><rect class="hit" x="{place * width:.2f}" y="0" '
            f'width="{width:.2f}" height="{HEIGHT:.0f}"/>{rects}</g>'
        )

    left, right = columns[0][0], columns[-1][0]
    half = (right - left) / max(1, len(stacks) - 1) / 2 if len(stacks) > 1 else 0.5
    axes = _Axes(
        marks=marks,
        across=sorted({round(x) for x in ticks(left, right, 5) if left <= x <= right}),
        left=left - half,
        right=right + half,
        x_label=x_label,
        text=text,
    )

    used = [name for name in colours if any(parts[name] > 0 for parts, _ in stacks)]
    totals = {name: sum(c[1].get(name, 0.0) for c in columns) / len(columns) for name in used}
    says = "Mean: " + "; ".join(f"{labels[name]} {text(value)}" for name, value in totals.items())

    return figure(
        title,
        _plot(shapes, axes, title) + legend([(colours[name], labels[name]) for name in used]),
        says=says,
        note=note,
    )


def share_bar(parts: Sequence[tuple[str, float, str]], title: str) -> Markup:
    """Return one bar of 100 % with parts (CSS class of the colour, share, text)."""
    cells = [
        (colour, f"{share:.3%}", percent(share) if share >= 0.08 else "", text)
        for colour, share, text in parts
        if share > 0
    ]
    return part("share_bar", cells, title)


def histogram(
    title: str,
    shares: Mapping[str, float],
    *,
    colour: str,
    x_label: str,
    note: str = "",
    other: tuple[Mapping[str, float], str] | None = None,
) -> Markup:
    """Return a histogram of shares by name; `other` adds the columns of another run."""
    sets = [(shares, colour), *([other] if other else [])]
    highest = max((share for values, _ in sets for share in values.values()), default=0.0) or 1.0
    names = list(dict.fromkeys(name for values, _ in sets for name in values))

    columns = [
        (
            name,
            " / ".join(percent(values.get(name, 0.0)) for values, _ in sets),
            [
                (
                    kind,
                    f"{values.get(name, 0.0) / highest:.1%}",
                    f"{x_label} {name}: {percent(values.get(name, 0.0))}",
                )
                for values, kind in sets
            ],
        )
        for name in names
    ]

    says = "; ".join(f"{name}: {percent(share)}" for name, share in shares.items())
    return figure(title, part("histogram", columns, x_label), says=says, note=note)


def strip(spans: Sequence[tuple[float, float]], colour: str, start: float, end: float) -> Markup:
    """Draw a timeline row of a stage: solid while it computes, paler in bins with partial work."""
    return Markup(_runs([[(colour, share)] for share in _shares_of(spans, start, end)]))


def stack(
    spans: Sequence[Span],
    colour: Callable[[str], str],
    start: float,
    end: float,
    is_work: Callable[[str], bool],
) -> Markup:
    """Draw a timeline row of a pool: the share of each reason, with work below and waits above."""
    reasons = sorted({what for _, _, what in spans}, key=lambda what: (not is_work(what), what))
    shares = {what: _shares_of([(a, b) for a, b, w in spans if w == what], start, end) for what in reasons}
    bins = len(next(iter(shares.values()), []))
    return Markup(
        _runs(
            [
                [(colour(what), shares[what][n]) for what in reasons if shares[what][n] > 0.004]
                for n in range(bins)
            ],
            stacked=True,
        )
    )


def _shares_of(
    spans: Sequence[tuple[float, float]], start: float, end: float, bins: int = MAX_POINTS
) -> list[float]:
    """Return for each of `bins` equal parts of the time the share that the spans cover."""
    width = (end - start) / bins or 1.0
    shares = [0.0] * bins
    for a, b in spans:
        a, b = max(a, start), min(b, end)
        first, last = int((a - start) / width), min(bins - 1, int((b - start) / width))
        for n in range(first, last + 1):
            shares[n] += max(0.0, min(b, start + (n + 1) * width) - max(a, start + n * width)) / width
    return [min(1.0, share) for share in shares]


def _runs(bins: Sequence[Sequence[tuple[str, float]]], *, stacked: bool = False) -> str:
    """Return rectangles, one for each run of adjacent bins with equal content."""
    width, at, shapes = WIDTH / (len(bins) or 1), 0, ""
    for look, group in groupby(
        [tuple((colour, round(share, 1 if not stacked else 2)) for colour, share in found) for found in bins]
    ):
        length = len(list(group))
        base = HEIGHT
        for colour, share in look:
            if share <= 0:
                continue
            height = share * HEIGHT if stacked else HEIGHT
            base -= height
            faint = "" if stacked or share >= 1 else f' opacity="{0.25 + 0.75 * share:.2f}"'
            shapes += (
                f'<rect class="{colour}" x="{at * width:.2f}" y="{max(0.0, base):.2f}" '
                f'width="{length * width + 0.3:.2f}" height="{height:.2f}"{faint}/>'
            )
        at += length
    return shapes
