# SPDX-License-Identifier: Apache-2.0
"""Render the sections of a report, one function each; a section without data is an empty string."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from markupsafe import Markup

from ...observe.account.accounting import StepAccount, is_work
from ...observe.table import map_coverage, percent
from .drawing.charts import Line, column_chart, figure, grid, histogram, legend, line_chart, share_bar
from .drawing.series import Series
from .drawing.wording import amount, colour_of, number_of_bytes, reason_in_words, role_colour, seconds
from .figures.data import FATES, RunData
from .html_page import part

RUN_COLOURS = ("c-generate", "c-train")
FATE_COLOURS = {
    "trained": "c-sync",
    "filtered": "c-logp",
    "expired": "c-values",
    "failed": "c-train",
    "in_flight": "c-none idle",
}


def device_seconds(run: RunData) -> Markup:
    """Return a bar and a table of the device-seconds of each pool."""
    if run.accounting is None:
        return Markup()

    figures = []
    for name, pool in run.accounting.pools.items():
        parts = ordered(pool.seconds, pool.total)
        bar = share_bar(
            [
                (colour_of(r), share, f"{reason_in_words(r)}: {percent(share)}, {seconds(s)} of devices")
                for r, s, share in parts
            ],
            f"pool {name}",
        )
        table = part(
            "table",
            ("activity", "share", "device-seconds"),
            [
                (part("swatch", colour_of(r), reason_in_words(r)), percent(share), f"{s:,.1f}")
                for r, s, share in parts
            ],
            "",
        )
        devices = (
            f"{pool.devices} device{'s' if pool.devices != 1 else ''} for "
            f"{seconds(run.accounting.wall_s)}, of which {percent(_worked(pool.seconds, pool.total))} is "
            f"work. Stages: {', '.join(pool.roles)}."
        )
        figures.append(figure(f"Pool {name}", bar + table, note=devices))

    return grid(
        *figures,
        lead="Every second of every device has one reason, and the sum is devices × time. "
        "Solid is work; stripes are waiting. The timeline counts generation as work while any response is "
        "open; this table subtracts the time in which, by the engines' own measurement, all open responses "
        "were in tools or reward functions.",
    )


def ordered(found: Mapping[str, float], total: float) -> list[tuple[str, float, float]]:
    """Return (reason, device-seconds, share): work, waiting, start-up; within each the largest first."""
    known = [(reason, s, s / total) for reason, s in found.items() if total and s / total >= 0.0005]
    return sorted(known, key=lambda item: (not is_work(item[0]), item[0] == "start_up", -item[1]))


def _worked(found: Mapping[str, float], total: float) -> float:
    return sum(s for reason, s in found.items() if is_work(reason)) / total if total else 0.0


def step_chart(run: RunData) -> Markup:
    """Return a chart of each step's seconds by the stage that the trainer waited for."""
    if run.accounting is None or not run.accounting.steps:
        return Markup()

    steps, left_out = _without_a_long_first(run.accounting.steps)
    total: Counter[str] = Counter()
    for step in steps:
        total.update(dict(step.seconds))
    roles = ["train", *(role for role, _ in total.most_common() if role != "train")]
    critical = Counter(step.critical for step in run.accounting.steps)
    counts = ", ".join(
        f"{role} in {count} of {critical.total()} steps" for role, count in critical.most_common()
    )

    return column_chart(
        "Seconds of each step, by the stage that took them",
        [(float(step.step), step.seconds) for step in steps],
        {role: role_colour(role) if role == "train" else colour_of(_reason(role)) for role in roles},
        {role: "training" if role == "train" else reason_in_words(_reason(role)) for role in roles},
        x_label="step",
        text=seconds,
        note=f"The critical stage, which took most of a step: {counts}.{left_out}",
    )


def _reason(role: str) -> str:
    """Return the trainer's reason for the stage that took a part of a step."""
    return role if role == "none" else f"wait_{role}"


def _without_a_long_first(steps: Sequence[StepAccount]) -> tuple[Sequence[StepAccount], str]:
    """Return the steps without a first step that dwarfs the others, and a sentence that says so."""
    took = [sum(step.seconds.values()) for step in steps]
    if len(took) < 4 or took[0] < 3 * median(took[1:]):
        return steps, ""
    return (
        steps[1:],
        f" The first step is left out: it took {seconds(took[0])}, of which "
        f"{seconds(max(steps[0].seconds.values()))} for {steps[0].critical}.",
    )


def _lines(
    runs: Sequence[RunData], pick: str, label: str = "", first: int = 0, dashed: bool = False
) -> list[Line]:
    """Return one line per run, in the colour of the run; a single run has the colour with index `first`."""
    many = len(runs) > 1
    return [
        Line(
            label=f"{'AB'[n]}: {run.name}" if many else label,
            series=getattr(run, pick),
            colour=RUN_COLOURS[n if many else first],
            dashed=dashed or (many and n == 1),
        )
        for n, run in enumerate(runs)
    ]


def learning(runs: Sequence[RunData]) -> Markup:
    """Return charts of reward and response length, and of a mixture's load of its experts."""
    single = runs[0] if len(runs) == 1 else None
    dots = (
        [
            Line(
                label=f"validation: {name.removeprefix('val-core/')}",
                series=series,
                colour="c-train",
                dots=True,
            )
            for name, series in single.validation.items()
        ]
        if single
        else []
    )

    reward = line_chart("Reward", [*_lines(runs, "reward", "trained responses, mean"), *dots], x_label="step")

    lengths = _lines(runs, "length_mean", "mean") + (
        _lines(runs, "length_max", "longest", 1) if single else []
    )
    length = line_chart(
        "Response length, tokens" if single else "Mean response length, tokens",
        lengths,
        x_label="step",
        low=0.0,
    )
    experts = line_chart(
        "Tokens of the busiest expert, relative to an even spread",
        _lines(runs, "busiest_expert", "mean of the layers")
        + (_lines(runs, "busiest_expert_worst", "worst layer", 1) if single else []),
        x_label="step",
        low=1.0,
    )
    return grid(reward, length, experts)


def freshness(runs: Sequence[RunData]) -> Markup:
    """Return a histogram of the lag and a chart of it over the steps."""
    first, other = runs[0], runs[1] if len(runs) > 1 else None
    named = [{str(lag): share for lag, share in run.lag_share.items()} for run in runs]
    if not any(named):
        return Markup()

    allowed = first.max_lag or 0
    bars = histogram(
        "Lag of trained responses",
        named[0],
        colour="c-generate",
        other=(named[1], "c-train") if other else None,
        x_label="lag: versions between the trainer and the oldest token",
        note="" if other else f"The allowed lag is {allowed} (max_lag); no sample was older.",
    )

    lines = [
        *_lines(runs, "lag_mean", "mean"),
        *(_lines([first], "lag_max", "largest", 1, True) if not other else []),
    ]
    title = "Mean and largest lag, versions" if not other else "Mean lag, versions"
    chart = line_chart(title, lines, x_label="step", low=0.0, high=1.0)
    return grid(bars, chart)


_PLACES = {
    "answering": ("being generated", "c-generate"),
    "finished": ("finished, waiting for a step", "c-logp"),
    "batched": ("in a batch, until trained", "c-train"),
}


def queues(run: RunData) -> Markup:
    """Return a chart of the number of groups in each place over time."""
    known = {place: _by_time(series) for place, series in run.queues.items()}
    if not known:
        return Markup()
    moments = next(iter(known.values())).x
    return column_chart(
        "Groups by place",
        [(t, {place: series.y[n] for place, series in known.items()}) for n, t in enumerate(moments)],
        {place: colour for place, (_, colour) in _PLACES.items()},
        {place: text for place, (text, _) in _PLACES.items()},
        x_label="seconds since the pipeline started",
        text=amount,
        note="Means over short intervals. A group is a prompt with its responses; admission bounds their "
        "number.",
    )


def _by_time(series: Series, bins: int = 120) -> Series:
    """Return the mean of a step function over equal intervals."""
    start, end = series.x[0], series.x[-1]
    width = (end - start) / bins or 1.0
    area = [0.0] * bins
    for a, b, y in zip(series.x, series.x[1:], series.y, strict=False):
        for n in range(int((a - start) / width), min(bins - 1, int((b - start) / width)) + 1):
            area[n] += y * max(0.0, min(b, start + (n + 1) * width) - max(a, start + n * width))
    return Series(x=[start + (n + 0.5) * width for n in range(bins)], y=[value / width for value in area])


def publications(run: RunData) -> Markup:
    """Return charts of the duration of each weight update and of the pause of the replicas."""
    done = run.publications
    if not done:
        return Markup()

    parts = {
        "gather": "gather: into host memory, while the trainer waits",
        "prepare": "prepare: checksums and copies, all replicas at once, during training",
        "load": "load: into the replicas, one after another",
    }
    colours = {"gather": "c-train", "prepare": "c-logp", "load": "c-generate"}
    stall, size = median(p.stall_s for p in done), median(p.num_bytes for p in done)
    coverage = "" if run.least_explained is None else f" {map_coverage(*run.least_explained)}."

    chart = column_chart(
        "Seconds of each weight update",
        [
            (float(p.version), {"gather": p.gather_s, "prepare": p.prepare_s, "load": p.commit_s})
            for p in done
        ],
        colours,
        parts,
        x_label="version",
        text=seconds,
        note=f"{len(done)} weight updates{f' of {number_of_bytes(size)}' if size else ''}. Medians: gather "
        f"{seconds(median(p.gather_s for p in done))}, "
        f"prepare {seconds(median(p.prepare_s for p in done))}, load "
        f"{seconds(median(p.commit_s for p in done))}.{coverage}",
    )

    stalls = Series(x=[float(p.version) for p in done], y=[p.stall_s for p in done])
    line = line_chart(
        "Stall: pause of the replicas for a load",
        [Line(label="stall", series=stalls, colour="c-train")],
        x_label="version",
        text=seconds,
        low=0.0,
        note=f"Median {seconds(stall)}; generation continues during the rest of the update.",
    )
    return grid(chart, line)


def fates(run: RunData, name: str = "") -> Markup:
    """Return a bar of the fates of all drawn groups; `name` prefixes the title."""
    drawn = sum(run.fates.values())
    if not drawn:
        return Markup()

    parts = [
        (
            FATE_COLOURS[f],
            run.fates.get(f, 0) / drawn,
            f"{f.replace('_', ' ')}: {run.fates.get(f, 0)} of {drawn} groups",
        )
        for f in FATES
        if run.fates.get(f)
    ]

    again = f" {run.regenerated} were generated again." if run.regenerated else ""
    keys = [
        (FATE_COLOURS[f], f"{f.replace('_', ' ')}: {run.fates.get(f, 0)}") for f in FATES if run.fates.get(f)
    ]

    return figure(
        f"{name}{drawn} groups drawn",
        share_bar(parts, "fates of groups") + legend(keys),
        note=f"Every drawn prompt has exactly one fate.{again}",
        wide=True,
    )
