# SPDX-License-Identifier: Apache-2.0
"""The steps of `async-pipeline verify-gpu`: what each runs, what it needs, and what it shows.

A step is a command in a separate process group, so that a fault of a driver or an engine ends no other
step. A step whose part is missing on this machine is not run, and the report says why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from ...tools.report.drawing.wording import ENGINE_LINE
from ..job import JobProcess, last_error

Status = Literal["passed", "failed", "not run"]
PASSED: Final = "passed"
FAILED: Final = "failed"
NOT_RUN: Final = "not run"
NOT_SELECTED = "not selected"
TAIL_LINES = 20
"""Lines of a failed step's output that the report shows."""
SHOWN_LINES, SHOWN_WIDTH = 3, 240
"""Of these, the last ones, cut to this width, are shown at once."""


@dataclass(frozen=True)
class Figure:
    """One figure of a step."""

    name: str
    """Two figures may have the same name."""
    value: Any
    """Not rounded."""
    meaning: str = ""


Figures = Sequence[Figure]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user has chosen."""

    device: str
    """`cuda` or `cpu`."""
    devices: int
    model: str | None
    """A checkpoint for the job, instead of the toy task's model."""
    configs: Path
    """The repository's folder of configs, which the wheel does not have."""
    task: Callable[[], Path]
    """Makes the toy task, or finds it."""
    folder: Path


@dataclass(frozen=True, kw_only=True)
class CheckStep:
    """One part of the check."""

    name: str
    shows: str
    """What it shows if it passes."""
    limit_s: float
    command: Callable[[Options, Path], Sequence[str]]
    """The command, which writes its figures to the given file."""
    needs: Sequence[str] = ()
    """Modules that it imports and that may not be installed."""
    missing: Callable[[Options], str | None] = lambda options: None
    """Why it cannot run here although its modules are installed, or None."""
    figures: Callable[[Any], Figures] = lambda found: ()
    """Of what the command wrote, what the report shows."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a step."""

    name: str
    shows: str
    status: Status
    seconds: float = 0.0
    detail: str = ""
    """Why it was not run, or the end of the output of a failure."""
    figures: Figures | None = None
    written: Any = None
    """All that it wrote, from which the figures are."""


def lacking(modules: Sequence[str]) -> str | None:
    """Return which of the modules are not installed, as a phrase, or None if all are."""
    missing = [name for name in modules if not _is_installed(name)]
    return f"needs {', '.join(missing)}" if missing else None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package that should contain it
        return False


def run_steps(
    steps: Iterable[CheckStep], options: Options, *, report: Callable[[str], None], chosen: Container[str]
) -> list[Result]:
    """Run the steps with the chosen names in turn; `report` gets lines before and after each."""
    results = []
    for step in steps:
        if step.name not in chosen:
            results.append(Result(name=step.name, shows=step.shows, status=NOT_RUN, detail=NOT_SELECTED))
            continue
        why = lacking(step.needs) or step.missing(options)
        if why is not None:
            report(f"{step.name}: not run: {why}")
            results.append(Result(name=step.name, shows=step.shows, status=NOT_RUN, detail=why))
            continue
        report(f"{step.name}: {step.shows} ...")
        result = run_step(step, options)
        *output, end = result.detail.splitlines() or [""]
        report(f"{step.name}: {result.status} after {result.seconds:.0f} s{end and f': {end}'}")
        for line in output[-SHOWN_LINES:]:
            report(f"    {line[:SHOWN_WIDTH]}")
        for figure in result.figures or ():
            if figure.name == "engine":
                report(f"    engine: {figure.value}")
        results.append(result)
    return results


def run_step(step: CheckStep, options: Options) -> Result:
    """Run one step whose parts are there."""
    log, written = options.folder / f"{step.name}.log", options.folder / f"{step.name}.json"
    written.unlink(missing_ok=True)
    started = time.monotonic()
    environment = {"ASYNC_PIPELINE_RUN": f"verify-{step.name}"}
    command = step.command(options, written)
    process = JobProcess(command, log, environment, own_session=True, folder=None)
    try:
        code: int | None = process.wait(step.limit_s)
    except TimeoutError:
        code = None
    finally:
        process.end_tree()
    seconds = time.monotonic() - started
    found = _found_in(written)
    figures = None if found is None else step.figures(found)
    engines = engines_in([log, *sorted(logs_of(step.name, options).rglob("*.log"))])
    if engines:
        figures = [*(figures or ()), *engines]
    if code == 0 and found is not None:
        return Result(
            name=step.name, shows=step.shows, status=PASSED, seconds=seconds, figures=figures, written=found
        )
    ended = f"it did not end within {step.limit_s:g} s" if code is None else f"exit status {code}"
    output = log.read_text(encoding="utf-8", errors="replace")
    why = f"{ended}: {last_error(output)}; the whole output is in {log}"
    return Result(
        name=step.name,
        shows=step.shows,
        status=FAILED,
        seconds=seconds,
        detail="\n".join([*output.splitlines()[-TAIL_LINES:], why]),
        figures=figures,
        written=found,
    )


def logs_of(step: str, options: Options) -> Path:
    """Return the folder in which a step may keep the output of several runs."""
    return options.folder / f"{step}-logs"


def engines_in(logs: Iterable[Path]) -> Figures:
    """Return which paths the engines of runs have taken, as their output says."""
    text = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    return [Figure("engine", met) for met in dict.fromkeys(ENGINE_LINE.findall(text))]


def _found_in(written: Path) -> Any:
    """Return what a step wrote, or None if it wrote nothing, or not all of it."""
    try:
        return json.loads(written.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
