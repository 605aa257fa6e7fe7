# SPDX-License-Identifier: Apache-2.0
"""The files of a run's folder, as they are: also of a run that crashed, is still going on, or lost some of
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.events import LogRecord
from ..errors import RunFilesError
from .event_file import read_events

PREFIX = "async_pipeline/"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What the tracker got for one step."""

    step: int
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What could be read, and in words what could not."""

    path: Path
    events: Sequence[LogRecord] = ()
    steps: Sequence[StepMetrics] = ()
    """Trained steps, in order."""
    validations: Sequence[StepMetrics] = ()
    """`step` is the version that was validated."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()


def read_run(path: Path) -> RunFiles:
    """Read a run's folder. Raises RunFilesError: it is none, or neither events nor metrics are in it."""
    if not path.is_dir():
        raise RunFilesError(
            f"{path} is no folder of a run; give the one that holds events.jsonl "
            "(trainer.v1.async_pipeline.run_dir)"
        )
    missing: list[str] = []
    events = _events(path / "events.jsonl", missing)
    steps, validations = _metrics(path / "metrics.jsonl", missing)
    earlier = len(list(path.glob("events.*.jsonl")))
    if earlier:
        missing.append(
            f"the run was resumed: the events of {earlier} earlier process{'es' if earlier > 1 else ''} "
            "are not shown, their metrics are"
        )
    if not events and not steps:
        raise RunFilesError(f"{path} has neither events nor metrics of a run: {'; '.join(missing)}")
    return RunFiles(
        path=path,
        events=events,
        steps=steps,
        validations=validations,
        summary=_mapping(
            path / "summary.json", missing, "the run is going on, or ended without leave to write it"
        ),
        config=_mapping(path / "config.json", missing, "settings cannot be compared"),
        missing=tuple(missing),
    )


def _events(path: Path, missing: list[str]) -> Sequence[LogRecord]:
    try:
        events = read_events(path)
    except FileNotFoundError:
        missing.append("events.jsonl is not there: no timeline, device-seconds, queues and publications")
        return ()
    except (OSError, ValueError, KeyError) as error:
        missing.append(
            f"events.jsonl cannot be read ({type(error).__name__}: {error}): no timeline, device-seconds, "
            "queues and publications"
        )
        return ()
    start = next((record for record in events if record.role == "flow" and record.event == "START"), None)
    if start is None or "graph" not in start.fields or "pools" not in start.fields:
        missing.append(
            "events.jsonl does not begin with the roles and pools of the run, as that of an older version: "
            "no device-seconds"
        )
        return ()
    return events


def _metrics(path: Path, missing: list[str]) -> tuple[list[StepMetrics], list[StepMetrics]]:
    steps: dict[int, StepMetrics] = {}
    validations: list[StepMetrics] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        missing.append(
            f"metrics.jsonl cannot be read ({type(error).__name__}): no rewards, lengths and lags; the "
            "tracker `file` writes it"
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
        missing.append(f"metrics.jsonl: {torn} of {len(lines)} lines are torn and left out")
    return [steps[step] for step in sorted(steps)], validations


def _mapping(path: Path, missing: list[str], without: str) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing.append(f"{path.name} is not there: {without}")
        return {}
    except (OSError, ValueError) as error:
        missing.append(f"{path.name} cannot be read ({type(error).__name__}): {without}")
        return {}
    return value if isinstance(value, dict) else {}
