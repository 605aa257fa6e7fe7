# SPDX-License-Identifier: Apache-2.0
"""Read the files of a run directory, also of a run that crashed, is still running, or lost some files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ....config.paths import select
from ....core.events import LogRecord
from ....core.replay import start_facts
from ....errors import RunFilesError
from ....observe.run_directory.picture_folder import Picture
from ...run_directory import events_of_steps, read_events, read_pictures, why_it_never_began
from ..drawing.wording import ENGINE_LINE, number_of_bytes

PREFIX = "async_pipeline/"
LIVE_BYTES = 4_000_000
"""Of a file that is read again and again while the run writes it; of larger ones only parts are read."""
SAMPLED, TAIL_BYTES = 500, 256_000
"""Lines of a larger file of metrics, at even distances, and what is read at its end."""
EVENTS_BYTES = 1_000_000
"""What is read at the end of a larger file of events."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics that the tracker received for one step."""

    step: int
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of the files, with a message in `missing` for each that could not be read."""

    path: Path
    events: Sequence[LogRecord] = ()
    steps: Sequence[StepMetrics] = ()
    """Trained steps, in order."""
    validations: Sequence[StepMetrics] = ()
    """Validations; `step` is the validated version."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    engine: str = ""
    """Version of vLLM, its model runner and attention, as the run printed it."""
    pictures: Sequence[Picture] = ()
    missing: Sequence[str] = ()


def read_run(path: Path, *, live: bool = False) -> RunFiles:
    """Read a run directory. Raises RunFilesError if it does not exist or has neither events nor metrics.

    `live`: read little of large files, and do not miss what a run writes at its end.
    """
    if not path.is_dir():
        raise RunFilesError(
            f"{path} is not a run directory; give the directory with events.jsonl "
            "(trainer.v1.async_pipeline.run_dir)"
        )

    missing: list[str] = []
    file = events_of_steps(path)
    events = _events(file, missing, live=live)
    config = _mapping(path / "config.json", missing, "settings cannot be compared")
    loggers = select(config, "trainer.logger") or ()
    steps, validations = _metrics(path / "metrics.jsonl", missing, tracked="file" in loggers, live=live)
    others = sorted(one.name for one in path.glob("events*.jsonl") if one != file)
    if others:
        missing.append(
            "the run was resumed: the report shows the metrics of all processes, but only the events of the "
            f"last one that trained, {file.name}, and not {', '.join(others)}"
        )
    ended = "the run is still running, or was killed before its end"
    summary = _mapping(path / "summary.json", [] if live else missing, ended)
    if not events and not steps:
        why = "; ".join(missing)
        if cause := why_it_never_began(path):
            why = cause
        raise RunFilesError(f"{path} has neither events nor metrics of a run: {why}")

    return RunFiles(
        path=path,
        events=events,
        steps=steps,
        validations=validations,
        summary=summary,
        config=config,
        engine=_engine(path / "run.log"),
        pictures=read_pictures(path, missing),
        missing=tuple(missing),
    )


def _engine(path: Path) -> str:
    """Return the first line in a run's output that says which engine it met; empty without one."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            met = (ENGINE_LINE.search(line) for line in lines)
            return next((match[1].strip() for match in met if match), "")
    except OSError:
        return ""


def _events(path: Path, missing: list[str], *, live: bool) -> Sequence[LogRecord]:
    try:
        if live and path.stat().st_size > LIVE_BYTES:
            events = _newest_events(path, missing)
        else:
            events = read_events(path)
    except FileNotFoundError:
        missing.append(f"{path.name} does not exist: no timeline, device-seconds, queues, weight updates")
        return ()
    except (OSError, ValueError, KeyError) as error:
        missing.append(
            f"{path.name} cannot be read ({type(error).__name__}: {error}): no timeline, device-seconds, "
            "queues, weight updates"
        )
        return ()

    if not {"graph", "pools"} <= start_facts(events).keys():
        missing.append(
            f"{path.name} does not begin with the stages and pools of the run (an older version wrote it): "
            "no device-seconds"
        )
        return ()
    return events


def _newest_events(path: Path, missing: list[str]) -> list[LogRecord]:
    """Return the first record, and the ones since a step near the end, as if the run had begun there."""
    with path.open("rb") as lines:
        first = LogRecord.of(json.loads(lines.readline()))
    found = []
    for line in lines_at_end(path, EVENTS_BYTES):
        with suppress(ValueError):  # a last line that is being written
            found.append(LogRecord.of(json.loads(line)))
    at = next((n for n, record in enumerate(found) if record.event == "TRAINED"), 0)
    if not found:
        return [first]
    missing.append(
        f"{path.name} has {number_of_bytes(path.stat().st_size)}: timeline, device-seconds, queues and "
        f"weight updates are the ones since step {found[at].fields.get('step', '?')}, from 0 s on; "
        "async-pipeline report reads all"
    )
    first = replace(first, t=0.0, fields={**first.fields, "startup_s": 0.0})
    return [first, *(replace(record, t=record.t - found[at].t) for record in found[at:])]


def lines_at_end(path: Path, most: int) -> list[bytes]:
    """Return the whole lines among the last `most` bytes of a file. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # With the byte before them: a line that begins there is whole.
        file.seek(max(0, size - most - 1))
        return file.read().splitlines()[size > most :]


def _lines(path: Path, *, live: bool) -> list[bytes]:
    if not live or path.stat().st_size <= LIVE_BYTES:
        return path.read_bytes().splitlines()
    found = []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for n in range(SAMPLED):
            file.seek(size * n // SAMPLED)
            if n:
                file.readline()
            found.append(file.readline())
    return [line for line in found if line] + lines_at_end(path, TAIL_BYTES)


def _metrics(
    path: Path, missing: list[str], *, tracked: bool, live: bool
) -> tuple[list[StepMetrics], list[StepMetrics]]:
    steps: dict[int, StepMetrics] = {}
    validations: list[StepMetrics] = []
    try:
        lines = _lines(path, live=live)
    except OSError as error:
        remedy = "no step was finished" if tracked else "set the tracker `file` to write it"
        missing.append(
            f"metrics.jsonl cannot be read ({type(error).__name__}): no rewards, lengths and lags; {remedy}"
        )
        return [], []

    torn = 0
    for line in lines:
        try:
            row = json.loads(line)
            step, data = int(row["step"]), dict(row["data"])
        except (ValueError, KeyError, TypeError):
            torn += 1
            continue

        version = data.get(f"{PREFIX}validation/version")
        if version is not None:
            validations.append(StepMetrics(step=int(version), data=data))
        else:
            steps[step] = StepMetrics(step=step, data=data)

    if torn:
        missing.append(f"metrics.jsonl: {torn} of {len(lines)} lines are incomplete and skipped")
    return [steps[step] for step in sorted(steps)], validations


def _mapping(path: Path, missing: list[str], without: str) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing.append(f"{path.name} does not exist: {without}")
        return {}
    except (OSError, ValueError) as error:
        missing.append(f"{path.name} cannot be read ({type(error).__name__}): {without}")
        return {}
    return value if isinstance(value, dict) else {}
