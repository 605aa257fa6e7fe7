# SPDX-License-Identifier: Apache-2.0
"""The report of one run as a page of its own: no network, no library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from statistics import fmean, median, quantiles

from .accounting import StepAccount, is_work
from .advice import FEW_STEPS, advise
from .advice_model import Advice
from .charts import Line, column_chart, figure, histogram, legend, line_chart, share_bar
from .report_data import FATES, RunData, Series
from .timeline import timeline
from .wording import amount, colour_of, number_of_bytes, percent, reason_in_words, role_colour, seconds

FATE_COLOURS = {
    "trained": "c-sync",
    "filtered": "c-logp",
    "expired": "c-values",
    "failed": "c-train",
    "in_flight": "c-none idle",
}


def page(title: str, body: str) -> str:
    """A whole document."""
    here = files(__package__)
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        'content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light '
        f'dark">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n'
        f'<body>\n<main>\n{body}\n</main>\n<div id="tip" '
        f"hidden></div>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def run_page(run: RunData) -> str:
    """The report of one run."""
    sections = [
        header(run),
        tiles(run),
        section("advice", "What to change", advice_list(advise(run), run)),
        section("timeline", "Timeline", timeline(run)),
        section("devices", "Where every device-second went", device_seconds(run)),
        section("steps", "What each step waited for", step_chart(run)),
        section("learning", "Learning", learning([run])),
        section("freshness", "How old the samples were", freshness([run])),
        section("queues", "Groups on their way", queues(run)),
        section("weights", "Publications of weights", publications(run)),
        section("samples", "What became of the groups", fates(run)),
        notes(run),
    ]
    return page(f"{run.name}: report", "\n".join(filter(None, sections)))


def section(name: str, title: str, body: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 '
        f'id="{name}-h">{escape(title)}</h2>{body}</section>'
        if body
        else ""
    )


def header(run: RunData) -> str:
    lag = "" if run.max_lag is None else f"<li>max_lag {run.max_lag}</li>"
    facts = (
        f'<li class="status {escape(run.status)}">{escape(run.status)}</li><li>{escape(run.strategy)}</li>'
        f"{lag}<li>{run.steps} steps</li><li>{seconds(run.wall_s)} in all</li>"
    )
    cause = (
        f'<p class="banner bad"><strong>The run failed.</strong> {escape(run.error)}</p>' if run.error else ""
    )
    missing = "".join(f"<li>{escape(text)}</li>" for text in run.missing)
    partial = (
        f'<div class="banner"><strong>This report is partial.</strong><ul>{missing}</ul></div>'
        if missing
        else ""
    )
    return (
        f'<header><p class="kicker">async_pipeline</p><h1>{escape(run.name)}</h1><ul '
        f'class="facts">{facts}</ul>{cause}{partial}</header>'
    )


def figures_of(run: RunData) -> Mapping[str, tuple[str, str]]:
    """Heading to the number and what it means; without what is not known."""
    found: dict[str, tuple[str, str]] = {}
    if run.step_s:
        steps = run.step_s[1:] or run.step_s
        spread = (
            f"median; 10th to 90th percentile {seconds(_decile(steps, 0))} to {seconds(_decile(steps, 8))}"
        )
        found["Step time"] = (seconds(median(steps)), spread)
    if run.samples_per_s:
        found["Throughput"] = (f"{amount(run.samples_per_s)} /s", "answers trained, without the first step")
    if run.typical is not None and run.typical.steady_s:
        after = "without the first step" if run.typical is run.warm else "since the first version was served"
        found["Overlap efficiency"] = (
            percent(run.typical.overlap_efficiency),
            f"of the fastest that any schedule could be on these pools, {after}",
        )
        found["Devices idle"] = (percent(run.typical.bubble_ratio), f"of device-seconds, {after}")
    if run.lag_mean:
        found["Lag"] = (
            amount(fmean(run.lag_mean.y)),
            f"versions on average; at most {max(run.lag_max.y, default=0):.0f} of {run.max_lag} allowed",
        )
    if run.reward:
        fifth = max(1, len(run.reward.y) // 5)
        found["Reward"] = (
            f"{amount(fmean(run.reward.y[:fifth]))} → {amount(fmean(run.reward.y[-fifth:]))}",
            "means over the first and last fifth of the steps",
        )
    return found


def _decile(values: Sequence[float], which: int) -> float:
    return quantiles(values, n=10, method="inclusive")[which] if len(values) > 1 else values[0]


def tiles(run: RunData) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b><span>{escape(means)}</span></dd></div>"
        for name, (value, means) in figures_of(run).items()
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def advice_list(advice: Sequence[Advice], run: RunData) -> str:
    if run.accounting is None or run.typical is None:
        return "<p>Without events there is nothing to base advice on.</p>"
    if len(run.accounting.steps) < FEW_STEPS:
        return f"<p>Advice needs {FEW_STEPS} steps; this run has {len(run.accounting.steps)}.</p>"
    if not advice:
        return (
            f'<p class="good">Nothing stands out. Steps were at {percent(run.typical.overlap_efficiency)} '
            "of the fastest that these pools allow, "
            "and no change that the model knows would gain 5 % or more.</p>"
        )
    cards = ""
    for one in advice:
        gain = f'<span class="gain">{escape(one.predicted)}</span>' if one.predicted else ""
        cards += (
            f"<li><p><strong>{_sentence(one.change)}</strong> {gain}</p><p>{_sentence(one.finding)}</p></li>"
        )
    how = (
        "<details><summary>How this is predicted</summary><p>A step cannot take less than any pool's work "
        "spread over its devices, nor less than one round "
        "of longest answer, log-probs, optimizer step and weights, divided by the batches that may be "
        "under way. The larger of these is the bound. A prediction "
        "changes the bound and assumes that the run stays as far above it as it was, that work spreads "
        "evenly over devices, and that the round gets no shorter. "
        "Generation counts as work while any answer is open. Try one change at a time, and compare with "
        "<code>async-pipeline report BEFORE AFTER</code>.</p></details>"
    )
    return f'<ol class="advice">{cards}</ol>{how}'


def _sentence(text: str) -> str:
    return escape(text[:1].upper() + text[1:] + ".")


def device_seconds(run: RunData) -> str:
    if run.accounting is None:
        return ""
    html = ""
    for name, pool in run.accounting.pools.items():
        parts = ordered(pool.seconds, pool.total)
        bar = share_bar(
            [
                (colour_of(r), share, f"{reason_in_words(r)}: {percent(share)}, {seconds(s)} of devices")
                for r, s, share in parts
            ],
            f"pool {name}",
        )
        rows = "".join(
            '<tr><th scope="row"><i class="swatch '
            f'{colour_of(r)}"></i>{escape(reason_in_words(r))}</th><td>{percent(share)}</td><td>{s:,.1f}</td></tr>'
            for r, s, share in parts
        )
        table = (
            '<table><thead><tr><th scope="col">what its devices did</th><th scope="col">share</th><th '
            f'scope="col">device-seconds</th></tr></thead><tbody>{rows}</tbody></table>'
        )
        devices = (
            f"{pool.devices} device{'s' if pool.devices != 1 else ''} for "
            f"{seconds(run.accounting.wall_s)}, {percent(_worked(pool.seconds, pool.total))} of it "
            f"at work. Roles: {', '.join(pool.roles)}."
        )
        html += figure(f"Pool {name}", bar + table, note=escape(devices))
    return (
        '<p class="lead">Every second of every device has one reason, and they add up to devices × '
        "time. Solid is work; stripes are waiting. The timeline shows generation as its role does, at "
        "work while any answer is open; here what the engines themselves say is taken off it, when all "
        f'open answers were with tools or reward functions.</p><div class="grid">{html}</div>'
    )


def ordered(found: Mapping[str, float], total: float) -> list[tuple[str, float, float]]:
    """Reason, device-seconds, share: work first, then waiting, the largest first."""
    known = [(reason, s, s / total) for reason, s in found.items() if total and s / total >= 0.0005]
    return sorted(known, key=lambda item: (not is_work(item[0]), item[0] == "start_up", -item[1]))


def _worked(found: Mapping[str, float], total: float) -> float:
    return sum(s for reason, s in found.items() if is_work(reason)) / total if total else 0.0


def step_chart(run: RunData) -> str:
    if run.accounting is None or not run.accounting.steps:
        return ""
    steps, left_out = _without_a_long_first(run.accounting.steps)
    total: Counter[str] = Counter()
    for step in steps:
        total.update(dict(step.seconds))
    roles = ["train", *(role for role, _ in total.most_common() if role != "train")]
    critical = Counter(step.critical for step in run.accounting.steps)
    told = ", ".join(
        f"{role} in {count} of {critical.total()} steps" for role, count in critical.most_common()
    )
    return column_chart(
        "Seconds of each step, by the role that it was spent on",
        [(float(step.step), step.seconds) for step in steps],
        {role: role_colour(role) if role == "train" else colour_of(_reason(role)) for role in roles},
        {role: "training" if role == "train" else reason_in_words(_reason(role)) for role in roles},
        x_label="step",
        text=seconds,
        note=f"The critical role, which took most of a step: {escape(told)}.{left_out}",
    )


def _reason(role: str) -> str:
    """Of the trainer, for what a step was spent on."""
    return role if role == "none" else f"wait_{role}"


def _without_a_long_first(steps: Sequence[StepAccount]) -> tuple[Sequence[StepAccount], str]:
    """Steps without the first if it would dwarf the others, and a sentence that says so."""
    took = [sum(step.seconds.values()) for step in steps]
    if len(took) < 4 or took[0] < 3 * median(took[1:]):
        return steps, ""
    return (
        steps[1:],
        f" The first step is left out: it took {seconds(took[0])}, of which "
        f"{seconds(max(steps[0].seconds.values()))} for {escape(steps[0].critical)}.",
    )


RUN_COLOURS = ("c-generate", "c-train")


def _lines(
    runs: Sequence[RunData], pick: str, label: str = "", first: int = 0, dashed: bool = False
) -> list[Line]:
    """One line a run, in its colour; of a single run, the colour of its place in the chart."""
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


def learning(runs: Sequence[RunData]) -> str:
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
    reward = line_chart("Reward", [*_lines(runs, "reward", "trained answers, mean"), *dots], x_label="step")
    lengths = _lines(runs, "length_mean", "mean") + (
        _lines(runs, "length_max", "longest", 1) if single else []
    )
    length = line_chart(
        "Length of answers, tokens" if single else "Mean length of answers, tokens",
        lengths,
        x_label="step",
        low=0.0,
    )
    return f'<div class="grid">{reward}{length}</div>' if reward or length else ""


def freshness(runs: Sequence[RunData]) -> str:
    first, other = runs[0], runs[1] if len(runs) > 1 else None
    named = [{str(lag): share for lag, share in run.lag_share.items()} for run in runs]
    if not any(named):
        return ""
    allowed = first.max_lag or 0
    bars = histogram(
        "Lag of trained answers",
        named[0],
        colour="c-generate",
        other=(named[1], "c-train") if other else None,
        x_label="lag: versions that the trainer was ahead of the oldest token",
        note=""
        if other
        else f"{allowed} {'is' if allowed == 1 else 'are'} allowed (max_lag); none was older.",
    )
    lines = [
        *_lines(runs, "lag_mean", "mean"),
        *(_lines([first], "lag_max", "largest", 1, True) if not other else []),
    ]
    title = "Mean and largest lag, versions" if not other else "Mean lag, versions"
    chart = line_chart(title, lines, x_label="step", low=0.0, high=1.0)
    return f'<div class="grid">{bars}{chart}</div>'


_PLACES = {
    "answering": ("being answered", "c-generate"),
    "finished": ("finished, waiting for a step", "c-logp"),
    "batched": ("in a batch, until it is trained", "c-train"),
}


def queues(run: RunData) -> str:
    known = {place: _by_time(series) for place, series in run.queues.items()}
    if not known:
        return ""
    moments = next(iter(known.values())).x
    return column_chart(
        "Groups by where they are",
        [(t, {place: series.y[n] for place, series in known.items()}) for n, t in enumerate(moments)],
        {place: colour for place, (_, colour) in _PLACES.items()},
        {place: text for place, (text, _) in _PLACES.items()},
        x_label="seconds since the pipeline began",
        text=amount,
        note="Means over short times. A group is a prompt with its answers; admission bounds how many "
        "there are.",
    )


def _by_time(series: Series, bins: int = 120) -> Series:
    """A count that holds until it changes, as its mean over equal times."""
    start, end = series.x[0], series.x[-1]
    width = (end - start) / bins or 1.0
    area = [0.0] * bins
    for a, b, y in zip(series.x, series.x[1:], series.y, strict=False):
        for n in range(int((a - start) / width), min(bins - 1, int((b - start) / width)) + 1):
            area[n] += y * max(0.0, min(b, start + (n + 1) * width) - max(a, start + n * width))
    return Series(x=[start + (n + 0.5) * width for n in range(bins)], y=[value / width for value in area])


def publications(run: RunData) -> str:
    done = run.publications
    if not done:
        return ""
    parts = {
        "gather": "gather: into host memory, the trainer waits",
        "transfer": "transfer: checksums and copies, beside training",
        "load": "load: into the replicas, one after another",
    }
    colours = {"gather": "c-train", "transfer": "c-logp", "load": "c-generate"}
    stall, size = median(p.stall_s for p in done), median(p.num_bytes for p in done)
    chart = column_chart(
        "Seconds of each publication",
        [
            (float(p.version), {"gather": p.gather_s, "transfer": p.transfer_s, "load": p.load_s})
            for p in done
        ],
        colours,
        parts,
        x_label="version",
        text=seconds,
        note=f"{len(done)} publications{f' of {number_of_bytes(size)}' if size else ''}. Medians: gather "
        f"{seconds(median(p.gather_s for p in done))}, "
        f"transfer {seconds(median(p.transfer_s for p in done))}, load "
        f"{seconds(median(p.load_s for p in done))}.",
    )
    stalls = Series(x=[float(p.version) for p in done], y=[p.stall_s for p in done])
    line = line_chart(
        "Stall: how long replicas stood still to load",
        [Line(label="stall", series=stalls, colour="c-train")],
        x_label="version",
        text=seconds,
        low=0.0,
        note=f"Median {seconds(stall)}; generation goes on during the rest.",
    )
    return f'<div class="grid">{chart}{line}</div>'


def fates(run: RunData, name: str = "") -> str:
    drawn = sum(run.fates.values())
    if not drawn:
        return ""
    parts = [
        (
            FATE_COLOURS[f],
            run.fates.get(f, 0) / drawn,
            f"{f.replace('_', ' ')}: {run.fates.get(f, 0)} of {drawn} groups",
        )
        for f in FATES
        if run.fates.get(f)
    ]
    again = f" {run.regenerated} were answered again because they held a step up." if run.regenerated else ""
    keys = [
        (FATE_COLOURS[f], f"{f.replace('_', ' ')}: {run.fates.get(f, 0)}") for f in FATES if run.fates.get(f)
    ]
    return figure(
        f"{name}{drawn} groups drawn",
        share_bar(parts, "what became of the groups") + legend(keys),
        note=f"Every prompt that was drawn has exactly one fate.{again}",
        wide=True,
    )


def notes(run: RunData) -> str:
    return (
        "<footer><p><strong>Words.</strong> A <em>version</em> is the policy after an optimizer step. "
        "<em>Lag</em> is how many versions the trainer was ahead of the version "
        "that wrote an answer's oldest token. A <em>pool</em> is a set of devices that a role must hold to "
        "compute. A <em>group</em> is a prompt with its answers.</p>"
        f"<p>Made from {escape(str(run.path))} alone. <code>trace.json</code> beside it shows every event; "
        "open it at ui.perfetto.dev.</p></footer>"
    )
