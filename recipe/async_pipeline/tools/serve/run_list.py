# SPDX-License-Identifier: Apache-2.0
"""The runs below a folder, and what the ends of their files say: how far each is, and what looks wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ...config.paths import select
from ...errors import RunFilesError
from ...observe.run_directory.run_files import EVENTS
from ..report.drawing.wording import seconds
from ..report.figures.run_reader import PREFIX, TAIL_BYTES, lines_at_end

METRICS, SUMMARY, SETTINGS = "metrics.jsonl", "summary.json", "settings.json"
DEPTH = 4
"""Folders below the given one in which runs are looked for."""
RECENT = 5
"""Steps that an alarm is about."""
SILENT_S, TIMES = 120.0, 5.0
"""A run is silent, or late with its step, after this time and so many times a step."""
NEAR = 0.9
"""Mean lag, as a share of the allowed one, at which nothing can be generated further ahead."""


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """Where a run is. Figures that its files do not have yet are None."""

    path: Path
    status: str
    """Of its summary; `running` or `silent` without one."""
    strategy: str
    written_s: float
    """Seconds since it wrote its events or metrics."""
    step: int = 0
    step_s: float | None = None
    """Median of the steps at the end of its metrics."""
    reward: float | None = None
    lag: float | None = None
    """Mean over the last steps."""
    alarms: Sequence[str] = field(default_factory=tuple)


def find_runs(top: Path) -> dict[str, Path]:
    """Return the run directories at or below a folder, by their path from there; links are not followed.

    Raises RunFilesError without one: it may be another folder.
    """
    found = {str(path.relative_to(top)) if path != top else path.resolve().name: path for path in _runs(top)}
    if not found:
        raise RunFilesError(
            f"{top} has no run directory (with {EVENTS} or {SUMMARY}) down to {DEPTH} folders below; give "
            "the folder of a run (trainer.v1.async_pipeline.run_dir) or one above it"
        )
    return found


def _runs(top: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(top):
        if {EVENTS, SUMMARY} & {*files}:
            yield Path(folder)
            below.clear()
        elif len(Path(folder).relative_to(top).parts) >= DEPTH:
            below.clear()
        below.sort()


def stamp_of(run: Path) -> tuple[tuple[int, int], ...]:
    """Return what changes whenever a run writes."""
    found = []
    for name in (EVENTS, METRICS, SUMMARY, "ledger.jsonl"):
        with suppress(OSError):
            about = (run / name).stat()
            found.append((about.st_mtime_ns, about.st_size))
    return tuple(found)


def state_of(run: Path, now: float) -> LiveState:
    """Return where a run is. `now`: seconds since the epoch. Reads at most TAIL_BYTES of its metrics."""
    summary, settings, config = (_mapping(run / name) for name in (SUMMARY, SETTINGS, "config.json"))
    rows = [*_rows(run / METRICS)]
    steps = [row for row in rows if f"{PREFIX}validation/version" not in row["data"]]
    took = _values(steps, "timing_s/step")
    step_s = median(took) if took else None
    written_s = max(0.0, now - max(_written(run / EVENTS), _written(run / METRICS)))
    patience_s = max(SILENT_S, TIMES * (step_s or 0.0))
    status = str(summary.get("status") or ("running" if written_s < patience_s else "silent"))
    alarms = [*_of_summary(summary)]
    if not summary.get("status"):
        alarms += _of_time(run, now, status, written_s, step_s, patience_s)
        alarms += _of_steps(steps, settings, config)
    return LiveState(
        path=run,
        status=status,
        strategy=str(settings.get("strategy") or summary.get("strategy") or "?"),
        written_s=written_s,
        step=int(summary.get("steps") or (steps[-1]["step"] if steps else 0)),
        step_s=step_s,
        reward=_mean(_values(steps[-RECENT:], "critic/score/mean")),
        lag=_mean(_values(steps[-RECENT:], f"{PREFIX}lag/mean")),
        alarms=tuple(alarms),
    )


def _of_summary(summary: Mapping[str, Any]) -> Iterator[str]:
    if error := summary.get("error"):
        yield f"the run ended: {str(error).splitlines()[0]}"
    for name, why in {
        **(summary.get("observers_off") or {}),
        **(summary.get("observers_failing") or {}),
    }.items():
        yield f"the observer {name} is off or failing: {why}"


def _of_time(
    run: Path, now: float, status: str, written_s: float, step_s: float | None, patience_s: float
) -> Iterator[str]:
    if status == "silent":
        yield f"it has written nothing for {seconds(written_s)}; its process may be gone"
    elif step_s is not None and (late_s := now - _written(run / METRICS)) > patience_s:
        yield f"no step has ended for {seconds(late_s)}, and one takes {seconds(step_s)}"


def _of_steps(
    steps: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[str]:
    allowed, recent = settings.get("staleness.max_lag"), steps[-RECENT:]
    lags = _values(recent, f"{PREFIX}lag/mean")
    if allowed and allowed > 1 and len(lags) == RECENT and min(lags) >= NEAR * allowed:
        yield (
            f"the mean lag of the last {RECENT} steps is {fmean(lags):.2f} of {allowed} allowed: generation "
            "cannot get further ahead"
        )
    ages, every = _values(recent[-1:], "checkpoint/age_steps"), select(config, "trainer.save_freq")
    if ages and isinstance(every, int) and every > 0 and ages[0] > 2 * every:
        yield f"the last checkpoint is {ages[0]:.0f} steps old, and trainer.save_freq is {every}"


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    found = (row["data"].get(name, row["data"].get(PREFIX + name)) for row in rows)
    return [float(value) for value in found if isinstance(value, int | float)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _written(path: Path) -> float:
    """Return when a file was written, 0.0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    lines: Sequence[bytes] = ()
    with suppress(OSError):
        lines = lines_at_end(path, TAIL_BYTES)
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            yield {"step": int(row["step"]), "data": dict(row["data"])}


def _mapping(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
