# SPDX-License-Identifier: Apache-2.0
"""Draw the activity of several runs over the same number of seconds, one run above the other.

`window_of` reads the events of a run and is pure; `draw` needs matplotlib. For each run, the upper part shows
one bar per prompt, from its request to its last response, and the lower part shows the training devices. A
prompt has the colour of the optimizer step that trains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....core.events import LogRecord
from ....core.replay import RunState, lane_of, start_facts
from ....errors import ConfigError, RunFilesError
from ..figures.run_reader import RunFiles

STEPS_SHOWN = 2.5
"""Length of the window in steps of the slowest run; all runs get the same number of seconds."""
STEPS_NEEDED = 6
STEADY_FROM = 0.2
"""Share of the steps before the window, in which the pipeline fills and caches warm up."""

COLOURS = ("#3f78b5", "#e0a030", "#3a9a7d", "#8a6bb8")
"""Colours of consecutive steps."""
IDLE, HATCH, EMPHASIS, TEXT = "#fbe9e7", "#e5a49b", "#b3402f", "#333333"
LANE_H, TRAIN_H, TITLE_H, GAP = 2.3, 13.0, 19.0, 5.0
"""Heights in points: a prompt, the training devices, the title of a run, and the gap between parts."""
WIDTH_IN, DPI = 8.0, 200


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One piece of work, in seconds since the window began."""

    start: float
    end: float
    step: int
    """The optimizer step that trains it."""
    lane: int = 0
    pale: bool = False
    """Whether it is log-probs instead of the optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A few seconds of the steady state of a run."""

    name: str
    max_lag: int
    seconds: float
    lanes: int
    """Largest number of prompts in flight at the same time."""
    prompts: Sequence[Slice]
    training: Sequence[Slice]
    updates: Sequence[float]
    """Times at which new weights were served."""
    steps: int
    """Optimizer steps that ended in the window."""

    @property
    def idle(self) -> float:
        """Share of the window in which no stage held the training devices."""
        return 1.0 - sum(s.end - s.start for s in self.training) / self.seconds


def common_seconds(runs: Iterable[RunFiles]) -> float:
    """Return the length of the window: a few steps of the slowest run.

    Raises RunFilesError if a run has too few steps.
    """
    return STEPS_SHOWN * max(_mean_step_s(run) for run in runs)


def window_of(run: RunFiles, seconds: float) -> Window:
    """Return the steady state of a run from its events. Raises RunFilesError if there are too few of them."""
    ends = _step_ends(run)
    origin = ends[int(len(ends) * STEADY_FROM)]
    trains_on = _step_of_prompt(run.events)
    everything = _in_lanes(
        (record.t - float(record.fields["seconds"]), record.t, trains_on[record.fields["key"]])
        for record in run.events
        if record.event == "ANSWERED" and record.fields["key"] in trains_on
    )
    return Window(
        name=str(run.summary.get("strategy") or run.path.name),
        max_lag=int(_facts(run)["max_lag"]),
        seconds=seconds,
        lanes=1 + max((s.lane for s in everything), default=0),
        prompts=_clipped(everything, origin, seconds),
        training=_clipped(_training(run), origin, seconds),
        updates=[
            record.t - origin
            for record in run.events
            if record.event == "SERVED" and 0 <= record.t - origin <= seconds
        ],
        steps=sum(origin < end <= origin + seconds for end in ends),
    )


def _facts(run: RunFiles) -> Mapping[str, Any]:
    if facts := start_facts(run.events):
        return facts
    raise RunFilesError(f"{run.path}/events.jsonl has no start of a pipeline; name the folder of another run")


def _step_ends(run: RunFiles) -> list[float]:
    ends = [record.t for record in run.events if record.role == "train" and record.event == "TRAINED"]
    if len(ends) < STEPS_NEEDED:
        raise RunFilesError(
            f"{run.path} must have at least {STEPS_NEEDED} steps for a picture of its steady state, "
            f"got {len(ends)}; train longer"
        )
    return ends


def _mean_step_s(run: RunFiles) -> float:
    steady = _step_ends(run)
    steady = steady[int(len(steady) * STEADY_FROM) :]
    return (steady[-1] - steady[0]) / (len(steady) - 1)


def _step_of_prompt(records: Sequence[LogRecord]) -> Mapping[str, int]:
    return {
        key: int(record.fields["step"])
        for record in records
        if record.event == "ASSEMBLED"
        for key in record.fields["keys"]
    }


def _in_lanes(spans: Iterable[tuple[float, float, int]]) -> list[Slice]:
    """Put each span into the first free lane; among spans that begin together, the longest comes first."""
    free_at: list[float] = []
    slices: list[Slice] = []
    for start, end, step in sorted(spans, key=lambda span: (round(span[0], 1), -span[1])):
        lane = next((n for n, free in enumerate(free_at) if free <= start + 0.01), len(free_at))
        free_at[lane : lane + 1] = [end]
        slices.append(Slice(start=start, end=end, step=step, lane=lane))
    return slices


def _training(run: RunFiles) -> list[Slice]:
    """Return the leases of the pool that trains."""
    state, slices = RunState(), []
    for record in run.events:
        held = state.leases.get(state.home.get("train", ""), {}).get(lane_of(record))
        state(record)
        if record.event == "RELEASE" and held is not None:
            step, pale = int(record.fields["step"]), record.role not in ("train", "critic")
            slices.append(Slice(start=held, end=record.t, step=step, pale=pale))
    return slices


def _clipped(slices: Iterable[Slice], origin: float, seconds: float) -> list[Slice]:
    return [
        Slice(
            start=max(0.0, s.start - origin),
            end=min(seconds, s.end - origin),
            step=s.step,
            lane=s.lane,
            pale=s.pale,
        )
        for s in slices
        if s.end > origin and s.start < origin + seconds
    ]


def draw(windows: Sequence[Window], path: Path) -> None:
    """Write the picture, as PNG or SVG by the name of `path`. Raises ConfigError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "--timeline requires matplotlib, which is not installed; run `pip install matplotlib`"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    heights = [TITLE_H + window.lanes * LANE_H + GAP + TRAIN_H for window in windows]
    margin_top, margin_bottom = 4.0, 46.0
    total = sum(heights) + GAP * len(windows) + margin_top + margin_bottom
    figure = pyplot.figure(figsize=(WIDTH_IN, total / 72), dpi=DPI)
    axes = figure.add_axes((0.095, margin_bottom / total, 0.895, 1 - (margin_top + margin_bottom) / total))
    seconds = windows[0].seconds
    axes.set_xlim(0, seconds)
    axes.set_ylim(-(total - margin_top - margin_bottom), 0)

    top = 0.0
    for window, height in zip(windows, heights, strict=True):
        _draw_run(axes, window, top)
        top -= height + GAP

    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=7.5, colors=TEXT, length=3)
    axes.set_xlabel("seconds", fontsize=8, color=TEXT, labelpad=2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _legend(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _draw_run(axes: Any, window: Window, top: float) -> None:
    """Draw one run below `top`: its title, a bar for each prompt, and the training devices."""
    axes.text(0, top - TITLE_H + 6, window.name, fontsize=10, fontweight="bold", color=TEXT, va="baseline")
    facts = (
        (f"training devices idle {window.idle:.0%}", EMPHASIS, "bold"),
        (f"{window.steps} optimizer steps, lag \u2264 {window.max_lag}", TEXT, "normal"),
    )
    for (fact, colour, weight), at in zip(facts, (1.0, 0.72), strict=True):
        axes.text(
            at * window.seconds,
            top - TITLE_H + 6,
            fact,
            fontsize=8,
            fontweight=weight,
            color=colour,
            ha="right",
            va="baseline",
        )

    upper = top - TITLE_H
    lower = upper - window.lanes * LANE_H
    for s in window.prompts:
        axes.broken_barh(
            [(s.start, s.end - s.start)],
            (upper - (s.lane + 1) * LANE_H + 0.2, LANE_H - 0.4),
            color=_colour(s.step),
            linewidth=0,
        )

    train = lower - GAP - TRAIN_H
    axes.broken_barh(
        [(0, window.seconds)], (train, TRAIN_H), facecolor=IDLE, edgecolor=HATCH, hatch="/////", linewidth=0
    )
    for s in window.training:
        axes.broken_barh(
            [(s.start, s.end - s.start)],
            (train, TRAIN_H),
            color=_colour(s.step, pale=s.pale),
            linewidth=0,
        )

    for update in window.updates:
        axes.plot(
            [update, update], [lower - GAP, lower - 0.5], color=TEXT, linewidth=0.7, solid_capstyle="butt"
        )
        axes.plot([update], [lower - 1], marker="^", markersize=2.6, color=TEXT, linewidth=0)

    for label, middle in (("prompts", (upper + lower) / 2), ("training", train + TRAIN_H / 2)):
        axes.text(-0.008 * window.seconds, middle, label, fontsize=8, color=TEXT, ha="right", va="center")


def _colour(step: int, *, pale: bool = False) -> str:
    colour = COLOURS[step % len(COLOURS)]
    if not pale:
        return colour
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(
                facecolor=COLOURS[0], label="a prompt in flight, and the step that trains it (same colour)"
            ),
            Patch(facecolor=_colour(0, pale=True), label="log-probs"),
            Patch(facecolor=IDLE, edgecolor=HATCH, hatch="/////", linewidth=0, label="idle"),
            Line2D([], [], color=TEXT, linewidth=0, marker="^", markersize=4, label="new weights served"),
        ],
        loc="lower center",
        ncols=4,
        frameon=False,
        fontsize=7.5,
        handlelength=1.4,
        columnspacing=1.6,
        handletextpad=0.5,
        labelcolor=TEXT,
    )
