# SPDX-License-Identifier: Apache-2.0
"""What becomes of the files of a run directory when another process goes on with the run.

ledger.jsonl     goes on in the same file, from a record that says from where
events.jsonl     of each process its own: those before are `events.1.jsonl`, `events.2.jsonl`, ...
run.log          likewise; it is `watch` that writes it, also for a run that begins anew in the same directory
metrics.jsonl    goes on after the checkpoint's step; as it was, it stays beside it as `metrics.1.jsonl`, ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def set_aside(path: Path) -> Path | None:
    """Give a file the next free number. Returns its new place; None: there is no such file."""
    if not path.exists():
        return None
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
    return kept


def rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The metrics of the steps up to this one. What validation found at one later than that is left out as
    well.
    """
    return [row for row in _rows(path) if int(row["step"]) <= step and not _is_later(row, step)]


def run_of(path: Path) -> str | None:
    """Which run a ledger is of; None: there is none, or its first record does not say."""
    return next((record.get("run") for record in _rows(path)), None)


def last_number(path: Path) -> int:
    """The highest number of a record of a ledger; 0: it has none."""
    numbers = (record.get("n") for record in _rows(path))
    return max((number for number in numbers if isinstance(number, int)), default=0)


def _is_later(row: dict[str, Any], step: int) -> bool:
    """A validation is logged with the newest step, whatever version it is of; one of the checkpoint's is
    done anew.
    """
    version = row["data"].get("async_pipeline/validation/version")
    return version is not None and version >= step


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole."""
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
