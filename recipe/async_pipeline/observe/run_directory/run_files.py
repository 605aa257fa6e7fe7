# SPDX-License-Identifier: Apache-2.0
"""Keep the files of a run directory when another process resumes the run.

ledger.jsonl     continues in the same file; a `resumed` record names the point of resumption
events.jsonl     one per process: earlier ones become `events.1.jsonl`, `events.2.jsonl`, ...
run.log          likewise; `watch` writes it, also for a new run in the same directory
metrics.jsonl    continues after the checkpoint's step; the earlier file becomes `metrics.1.jsonl`, ...
summary.json     likewise, as config.json, settings.json and the other files that a process writes once

A run that starts in the directory of an earlier one moves its records to `earlier.1`, `earlier.2`, ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"


def set_aside(path: Path) -> Path | None:
    """Rename a file to the next free number. Returns the new path, or None if there is no such file."""
    if not path.exists():
        return None
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
    return kept


RECORDS = (
    *("ledger*.jsonl", "events*.jsonl", "metrics*.jsonl", "summary*.json", "trace*.json", "report*.html"),
    *("config*.json", "settings*.json", "diagnosis.txt", "agent_output", "pictures", "reference"),
)
"""What a run leaves in its directory, except for checkpoints and for `run.log`, which `watch` sets aside."""


def set_aside_run(folder: Path) -> Path | None:
    """Move the records of a run to a folder below its directory. Returns it, or None without any record."""
    records = [path for pattern in RECORDS for path in sorted(folder.glob(pattern))]
    if not records:
        return None
    number = 1
    while (kept := folder / f"earlier.{number}").exists():
        number += 1
    kept.mkdir()
    for path in records:
        path.rename(kept / path.name)
    return kept


def rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the metrics of all steps up to this one, without validations of later versions."""
    return [row for row in _rows(path) if int(row["step"]) <= step and not _is_later(row, step)]


def run_of(path: Path) -> str | None:
    """Return the run id of a ledger, or None if the file does not exist or its first record has no id."""
    return next((record.get("run") for record in _rows(path)), None)


def last_number(path: Path) -> int:
    """Return the highest record number of a ledger, or 0 if it has no record."""
    numbers = (record.get("n") for record in _rows(path))
    return max((number for number in numbers if isinstance(number, int)), default=0)


def _is_later(row: dict[str, Any], step: int) -> bool:
    """Return whether a row validates this version or a later one, which the resumed run validates again.

    A validation is logged with the newest step, independent of the version that it validates.
    """
    version = row["data"].get("async_pipeline/validation/version")
    return version is not None and version >= step


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSON lines file; none if it does not exist."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row
