# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline report`: what a run did and what to change, on one page; or two runs side by side."""

from __future__ import annotations

import argparse
import json
import webbrowser
from pathlib import Path
from typing import Any

from ...console import echo
from ...errors import AsyncPipelineError, RunFilesError
from ...observe.account.accountant import summary_of
from ...observe.table import map_coverage
from ..report.advice import advise
from ..report.advice_model import facts_of
from ..report.compare import compare_page
from ..report.drawing.schedule_picture import common_seconds, draw, window_of
from ..report.figures.data import RunData, changed_settings, data_of
from ..report.figures.run_reader import read_run
from ..report.page import figures_of, run_page
from ..report.trace import write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline report`."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directory; give two to compare them"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write the page to (default: report.html in the last run directory)",
    )

    parser.add_argument("--open", dest="open_it", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print the figures and the advice as JSON; write a page only with --out",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="draw the stages of any runs on one time axis instead, as PNG or SVG (needs matplotlib)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page. Raises RunFilesError if one is no run directory, or there are more than two."""
    if args.timeline is not None:
        _draw(args.runs, args.timeline)
        return 0
    if len(args.runs) > 2:
        raise RunFilesError(
            f"a report is about one run, or compares two, got {len(args.runs)}; give one or two run "
            "directories"
        )

    found = [_read(path) for path in args.runs]
    if args.as_json:
        echo(json.dumps(as_json(found), indent=2))
    if not args.as_json or args.out is not None:
        path = _write(found, args.out)
        if not args.as_json:
            _say(found, path)
        if args.open_it:
            webbrowser.open(path.resolve().as_uri())
    return 0


def _draw(folders: list[Path], path: Path) -> None:
    runs = [read_run(folder) for folder in folders]
    seconds = common_seconds(runs)
    draw([window_of(run, seconds) for run in runs], path)
    echo(f"wrote {path}")


def _read(path: Path) -> RunData:
    files = read_run(path)
    if files.events and not _has_trace(path):
        try:
            write_trace(path)
        except (OSError, AsyncPipelineError) as error:
            echo(f"no trace.json: {error}")
    return data_of(files)


def _has_trace(path: Path) -> bool:
    """Return whether there is a trace that includes all events."""
    trace = path / "trace.json"
    return trace.exists() and trace.stat().st_mtime >= (path / "events.jsonl").stat().st_mtime


def _write(found: list[RunData], out: Path | None) -> Path:
    path = out or found[-1].path / (
        "report.html" if len(found) == 1 else f"report-against-{found[0].path.resolve().name}.html"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_page(found[0]) if len(found) == 1 else compare_page(*found), encoding="utf-8")
    return path


def _say(found: list[RunData], path: Path) -> None:
    for data in found:
        figures = "; ".join(
            f"{name.lower()} {tile.text}"
            + (f" ({data.typical_time})" if data.typical_time in tile.meaning else "")
            for name, tile in figures_of(data).items()
        )
        echo(
            f"{data.name}: {data.status}, {data.strategy}, {data.steps} steps"
            + (f"; {figures}" if figures else "")
        )
        if data.error:
            echo(f"  cause: {data.error}")
        if data.least_explained is not None:
            echo(f"  {map_coverage(*data.least_explained)}")
        for text in data.missing:
            echo(f"  missing: {text}")
        for advice in advise(data):
            echo(f"  advice: {advice}")
    echo(f"wrote {path}")


def as_json(found: list[RunData]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    runs = [_run_as_json(data) for data in found]
    if len(found) == 1:
        return runs[0]
    changed = changed_settings(found[0].config, found[1].config)
    return {"runs": runs, "changed": [{"key": key, "a": a, "b": b} for key, a, b in changed]}


def _run_as_json(data: RunData) -> dict[str, Any]:
    facts = facts_of(data)

    return {
        "run": str(data.path),
        "status": data.status,
        "strategy": data.strategy,
        "max_lag": data.max_lag,
        "steps": data.steps,
        "samples_per_s": data.samples_per_s,
        "lag_share": {str(lag): share for lag, share in data.lag_share.items()},
        "groups": dict(data.fates),
        "trainer": dict(facts.trainer) if facts else {},
        "explained_share": None if data.least_explained is None else data.least_explained[0],
        **_account_as_json(data),
        "advice": [
            {
                "rule": one.rule,
                "finding": one.finding,
                "change": one.change,
                "gain": one.gain,
                "at_most": one.at_most,
            }
            for one in advise(data)
        ],
        "missing": list(data.missing),
    }


def _account_as_json(data: RunData) -> dict[str, Any]:
    """Return all device-seconds, and the ratios without the first step, as the page has them."""
    if data.accounting is None or data.typical is None:
        return {}
    ratios = summary_of(data.typical)
    return summary_of(data.accounting) | {
        name: ratios[name] for name in ("bubble_ratio", "overlap_efficiency")
    }
