# SPDX-License-Identifier: Apache-2.0
"""The pages of the server: a list of runs, a run's report with alarms, two runs, the episodes of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote, urlencode

from markupsafe import Markup

from ...errors import RunFilesError
from ..ledger.file import NAME
from ..report.compare import compare_page
from ..report.drawing.wording import amount, number_of_bytes, seconds
from ..report.episode_page import episode_page
from ..report.figures.data import RunData, data_of
from ..report.figures.episodes import read_episodes
from ..report.figures.run_reader import read_run
from ..report.html_page import TEMPLATES, page
from ..report.page import LiveParts, run_page
from .run_list import LiveState

LEDGER_BYTES = 64_000_000
"""Of a ledger that is read for a page."""
WORST = 64
"""Episodes of a page, the lowest rewards first."""


@cache
def script() -> Markup:
    """Return what renews a page."""
    return Markup(files(__package__).joinpath("live.js").read_text(encoding="utf-8"))


def list_page(top: Path, states: Mapping[str, LiveState]) -> str:
    """Return the page of all runs, what was written last first."""
    rows = [
        (
            f"run/{quote(name)}",
            name,
            state.status,
            state.strategy,
            f"{state.step:,}",
            "" if state.step_s is None else seconds(state.step_s),
            "" if state.reward is None else amount(state.reward),
            "" if state.lag is None else f"{state.lag:.2f}",
            f"{seconds(state.written_s)} ago",
            state.alarms,
        )
        for name, state in sorted(states.items(), key=lambda item: item[1].written_s)
    ]
    return page(f"{TEMPLATES}/runs.html", title=f"{top.name}: runs", top=top, rows=rows, live=script())


def live_page(name: str, state: LiveState, home: str) -> str:
    """Return the report of a run as it is now. `home`: the address of the list, relative to the page's.

    Raises RunFilesError if it has no events and no metrics yet.
    """
    last = state.step
    links: list[tuple[str, str]] = [(home, "all runs")]
    if last:
        links.append(
            (f"{home}episodes/{quote(name)}?{urlencode({'step': last})}", f"episodes of step {last}")
        )
    written = f"written {seconds(state.written_s)} ago"
    return run_page(_data(state), LiveParts(script(), links, state.alarms, written))


def pair_page(a: LiveState, b: LiveState) -> str:
    """Return the page of two runs side by side. Raises as `live_page`."""
    return compare_page(_data(a), _data(b))


def episodes_of(run: Path, step: int | None) -> str:
    """Return the page of a step's episodes. Raises RunFilesError if there is no such step, or too much to
    read for a page.
    """
    ledger = run / NAME
    if ledger.is_file() and (size := ledger.stat().st_size) > LEDGER_BYTES:
        raise RunFilesError(
            f"{ledger} has {number_of_bytes(size)}, and a page reads at most "
            f"{number_of_bytes(LEDGER_BYTES)}; use async-pipeline episodes {run} --html"
        )
    return episode_page(run, read_episodes(run, step), WORST)


def message_page(text: str) -> str:
    """Return a page that says something instead."""
    return page(f"{TEMPLATES}/runs.html", title="async_pipeline", top=text, rows=(), live=script())


def _data(state: LiveState) -> RunData:
    return replace(data_of(read_run(state.path, live=True)), status=state.status)
