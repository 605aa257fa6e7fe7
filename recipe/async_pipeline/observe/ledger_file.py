# SPDX-License-Identifier: Apache-2.0
"""Read and audit the ledger files of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.ledger_audit import Audit, Record, audit, horizon
from ..errors import ConfigError

NAME = "ledger.jsonl"


def audit_file(path: Path) -> Audit:
    """Audit a ledger; `path` is its file or the run directory. Raises ConfigError: there is none."""
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} is not there; give a run directory that has a {NAME}")
    resumptions, broken = _survey(file)
    counts = horizon(resumptions)
    void = 0

    def valid() -> Iterator[Record]:
        nonlocal void
        for place, record in _lines(file):
            if place in broken:
                yield {"kind": f"line {place + 1} is not whole"}
            elif record is not None and counts(place, _number(record)):
                yield record
            else:
                void += record is not None

    found = audit(valid())
    found.void = void
    found.processes += sum(not counts(place, number) for place, number in resumptions)
    if found.status == "running" and _completed(file.with_name("summary.json")):
        found.violations.append(
            "summary.json says that the run completed, but the ledger has no end: its last records are "
            "missing"
        )
        found.num_violations += 1
    return found


def _completed(summary: Path) -> bool:
    """Does the run say so?"""
    try:
        return bool(json.loads(summary.read_text(encoding="utf-8")).get("status") == "completed")
    except (OSError, ValueError, AttributeError):
        return False


def _survey(file: Path) -> tuple[list[tuple[int, int]], set[int]]:
    """Place and number of each `resumed` record; places of lines that are not whole and should be."""
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
    """One that is none is for the auditor to complain of."""
    number = record.get("n")
    return number if isinstance(number, int) else 0


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """None: a line is not whole."""
    with file.open("rb") as lines:
        for place, line in enumerate(lines):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield place, record if isinstance(record, dict) else None
