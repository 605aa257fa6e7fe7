# SPDX-License-Identifier: Apache-2.0
"""Render the report of one run as a self-contained page: no network access, no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean, median, quantiles

from ...observe.wording import amount, percent, seconds
from .advice import FEW_STEPS, advise
from .advice_model import Advice
from .data import RunData
from .episode_charts import episodes
from .html_page import page
from .pictures import pictures
from .sections import device_seconds, fates, freshness, learning, publications, queues, step_chart
from .timeline import timeline


def run_page(run: RunData) -> str:
    """Return the report of one run."""
    sections = [
        header(run),
        tiles(run),
        section("advice", "What to change", advice_list(advise(run), run)),
        section("timeline", "Timeline", timeline(run)),
        section("devices", "Device-seconds", device_seconds(run)),
        section("steps", "Critical stages", step_chart(run)),
        section("learning", "Learning", learning([run])),
        section("episodes", "Episodes", episodes(run.episodes)),
        section("pictures", "Pictures", pictures(run.pictures, run.mismatch)),
        section("freshness", "Age of samples", freshness([run])),
        section("queues", "Groups in flight", queues(run)),
        section("weights", "Weight updates", publications(run)),
        section("samples", "Fates of groups", fates(run)),
        notes(run),
    ]
    return page(f"{run.name}: report", "\n".join(filter(None, sections)))


def section(name: str, title: str, body: str) -> str:
    """Return a section with a heading, or an empty string if the body is empty."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 '
        f'id="{name}-h">{escape(title)}</h2>{body}</section>'
        if body
        else ""
    )


def header(run: RunData) -> str:
    """Return the name and status of the run, its error, and the messages about missing files."""
    lag = "" if run.max_lag is None else f"<li>max_lag {run.max_lag}</li>"
    facts = (
        f'<li class="status {escape(run.status)}">{escape(run.status)}</li><li>{escape(run.strategy)}</li>'
        f"{lag}<li>{run.steps} steps</li><li>{seconds(run.wall_s)} in total</li>"
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
    """Return heading to (value, meaning) of each figure that the run provides."""
    found: dict[str, tuple[str, str]] = {}
    if run.step_s:
        steps = run.step_s[1:] or run.step_s
        spread = (
            f"median; 10th to 90th percentile {seconds(_decile(steps, 0))} to {seconds(_decile(steps, 8))}"
        )
        found["Step time"] = (seconds(median(steps)), spread)

    if run.samples_per_s:
        found["Throughput"] = (
            f"{amount(run.samples_per_s)} samples/s",
            "responses trained, without the first step",
        )

    if run.typical is not None and run.typical.steady_s:
        found["Overlap efficiency"] = (
            percent(run.typical.overlap_efficiency),
            f"of the fastest possible schedule on these pools, {run.typical_time}",
        )
        found["Devices idle"] = (percent(run.typical.bubble_ratio), f"of device-seconds, {run.typical_time}")

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
    """Return the main figures of the run as tiles."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b><span>{escape(means)}</span></dd></div>"
        for name, (value, means) in figures_of(run).items()
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def advice_list(advice: Sequence[Advice], run: RunData) -> str:
    """Return the advice as a list, or a paragraph with the reason for its absence."""
    if run.accounting is None or run.typical is None:
        return "<p>Advice needs events.jsonl.</p>"
    if len(run.accounting.steps) < FEW_STEPS:
        return f"<p>Advice needs {FEW_STEPS} steps; this run has {len(run.accounting.steps)}.</p>"
    if not advice:
        return (
            '<p class="good">No advice. The steps reached '
            f"{percent(run.typical.overlap_efficiency)} of the fastest possible schedule on these pools, and "
            "the model predicts no gain of 5 % or more for any change.</p>"
        )

    cards = ""
    for one in advice:
        gain = f'<span class="gain">{escape(one.predicted)}</span>' if one.predicted else ""
        cards += (
            f"<li><p><strong>{_sentence(one.change)}</strong> {gain}</p><p>{_sentence(one.finding)}</p></li>"
        )

    how = (
        "<details><summary>How gains are predicted</summary><p>A step takes at least as long as each pool's "
        "work spread over its devices, and at least as long as one loop of longest response, log-probs, "
        "optimizer step and weight update, divided by the number of batches in flight. The larger value is "
        "the bound. A prediction changes the bound and assumes that the run stays as far above it as it "
        "was, that work spreads evenly over devices, and that the loop does not get shorter. Generation "
        "counts as work while any response is open. Try one change at a time, and compare with "
        "<code>async-pipeline report BEFORE AFTER</code>.</p></details>"
    )
    return f'<ol class="advice">{cards}</ol>{how}'


def _sentence(text: str) -> str:
    return escape(text[:1].upper() + text[1:] + ".")


def notes(run: RunData) -> str:
    """Return the footer: the terms of the report, and its source."""
    return (
        "<footer><p><strong>Terms.</strong> A <em>version</em> is the policy after an optimizer step. "
        "<em>Lag</em> is the number of versions between the trainer and the version that wrote the oldest "
        "token of a response. A <em>pool</em> is a set of devices that a stage must hold to compute. A "
        "<em>group</em> is a prompt with its responses.</p>"
        f"<p>Source: {escape(str(run.path))}. <code>trace.json</code> in the same directory shows every "
        "event; open it at ui.perfetto.dev.</p></footer>"
    )
