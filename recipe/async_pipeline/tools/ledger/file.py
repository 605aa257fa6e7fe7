# SPDX-License-Identifier: Apache-2.0
"""Read and audit the ledger files of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..run_directory import why_it_never_began
from .audit import Audit, LedgerFields, audit, horizon

NAME = "ledger.jsonl"


def audit_file(path: Path) -> Audit:
    """Audit a ledger, given by its file or its run directory. Raises ConfigError if it does not exist."""
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        why = why_it_never_began(file.parent) or f"give a run directory with a {NAME}"
        raise ConfigError(f"{file} does not exist; {why}")
    resumptions, broken = _survey(file)
    counts = horizon(resumptions)
    void = 0

    def valid() -> Iterator[LedgerFields]:
        nonlocal void
        for place, record in _lines(file):
            if place in broken:
                yield {"kind": f"line {place + 1} is incomplete"}
            elif record is not None and counts(place, _number(record)):
                yield record
            else:
                void += record is not None

    found = audit(valid())
    if not file.stat().st_size and not _has_bytes(file.with_name("metrics.jsonl")):
        # The run opened the file, and ended before the first record.
        found.violations, found.num_violations = [], 0
    found.void = void
    found.processes += sum(not counts(place, number) for place, number in resumptions)
    if found.status == "running" and _completed(file.with_name("summary.json")):
        found.violations.append(
            "summary.json says that the run completed, but the ledger has no end record; its last records "
            "are missing"
        )
        found.num_violations += 1
    return found


def _has_bytes(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def _completed(summary: Path) -> bool:
    """Return whether summary.json says that the run completed; False if it cannot be read."""
    try:
        return bool(json.loads(summary.read_text(encoding="utf-8")).get("status") == "completed")
    except (OSError, ValueError, AttributeError):
        return False


def _survey(file: Path) -> tuple[list[tuple[int, int]], set[int]]:
    """Return place and number of each `resumed` record, and the places of unexpected incomplete lines.

    A line directly before a `resumed` record, and the last line, may be incomplete: a crash cut it short.
    """
    resumptions, broken, torn = [], set(), None
    for place, record in _lines(file):
        resumed = record is not None and record.get("kind") == "resumed"
        if torn is not None and not resumed:
            broken.add(torn)
        torn = place if record is None else None
        if record is not None and resumed:
            resumptions.append((place, _number(record)))
    return resumptions, broken


def _number(record: Mapping[str, Any]) -> int:
    """Return the record's number, or 0 if it has none; the audit reports such a record."""
    number = record.get("n")
    return number if isinstance(number, int) else 0


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the place and record of each line; the record is None if the line is incomplete."""
    with file.open("rb") as lines:
        for place, line in enumerate(lines):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield place, record if isinstance(record, dict) else None
