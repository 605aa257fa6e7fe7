# SPDX-License-Identifier: Apache-2.0
"""Read what a run has left in its directory: the files that the package's `observe` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ..core.events import LogRecord
from ..observe.run_directory.picture_folder import FOLDER, INDEX, Picture
from ..observe.run_directory.run_files import EVENTS


def events_of_steps(folder: Path) -> Path:
    """Return the events of the newest process that trained a step; `events.jsonl` if none did.

    A process that resumes a completed run, or fails before its first step, has no figures.
    """
    newest = folder / EVENTS
    numbered = sorted(folder.glob("events.*.jsonl"), key=_number_of, reverse=True)
    return next((path for path in (newest, *numbered) if path.exists() and _trained(path)), newest)


def _number_of(path: Path) -> int:
    number = path.name.split(".")[1]
    return int(number) if number.isdigit() else 0


def _trained(path: Path) -> bool:
    with path.open("rb") as lines:
        return any(b'"TRAINED"' in line for line in lines)


def why_it_never_began(run_dir: Path) -> str:
    """Return what a run that left no events says about its end, or nothing."""
    with suppress(OSError, ValueError, AttributeError):
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        if error := summary.get("error"):
            return f"it ended ({summary['status']}) before it began: {error}"
    return ""


def read_events(path: Path) -> list[LogRecord]:
    """Return the records of an `events.jsonl`, without a last line that a crash cut short.

    Raises OSError if the file cannot be read, ValueError or KeyError if another line is not a record.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) - 1:
                break
            raise
        records.append(LogRecord.of(fields))
    return records


def read_pictures(run_dir: Path, missing: list[str]) -> Sequence[Picture]:
    """Return the pictures of a run by step; adds a line to `missing` if some cannot be read."""
    folder = run_dir / FOLDER
    try:
        lines = (folder / INDEX).read_bytes().splitlines()
    except FileNotFoundError:
        return ()
    except OSError as error:
        missing.append(f"{FOLDER}/{INDEX} cannot be read ({type(error).__name__}): no pictures")
        return ()

    found: dict[str, Picture] = {}
    lost = 0
    for line in lines:
        try:
            about = msgspec.json.decode(line, type=Picture)
            # The name of a file, not a path to another place.
            png = (folder / Path(about.file).name).read_bytes()
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            lost += 1
            continue
        found[about.file] = msgspec.structs.replace(about, png=png)
    if lost:
        missing.append(f"{FOLDER}: {lost} of {len(lines)} pictures cannot be read")
    return sorted(found.values(), key=lambda one: (one.step, one.file))
