# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline ledger RUN`: does the ledger of a run hold together? Exit status 0 if it does, 1 if not.

A line that was not written to its end is no violation where a process was killed: at the end of the file, or
before the
record of the process that went on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.ledger_audit import Audit, Record, audit, horizon
from ..errors import ConfigError
from .main import echo

NAME = "ledger.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`ledger RUN [--json]`."""
    parser.add_argument(
        "run", type=Path, metavar="RUN", help=f"a run directory, such as outputs/smoke/latest, or its {NAME}"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError: there is no ledger."""
    found = audit_file(args.run)
    for line in [json.dumps(found.as_dict(), indent=2)] if args.json else in_words(found):
        echo(line)
    return 0 if found.ok else 1


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


def in_words(found: Audit) -> list[str]:
    """Lines for a person."""
    state = {"completed": "completed", "running": "has not ended, or was killed"}.get(
        found.status, found.status
    )
    times = found.processes - 1 + found.begun_elsewhere
    resumed = f", resumed {'once' if times == 1 else f'{times} times'}" if times else ""
    elsewhere = "; those before are in another ledger" if found.begun_elsewhere else ""
    again = f"; {found.void} records are void" if found.void else ""
    lines = [
        f"run          {state} after step {found.steps}{resumed}{again}",
        f"prompts      {found.dispatched} dispatched = {found.trained} trained + {found.filtered} filtered + "
        f"{found.expired} expired + {found.failed} failed + {found.in_flight} in flight",
        f"answers      {found.trajectories_trained} trained{elsewhere}; {found.regenerated} prompts were "
        "answered again",
        f"lag          at most {found.lag_max}; {found.max_lag} is allowed",
    ]
    if found.ok:
        return [*lines, "ok           every prompt has one fate, no answer was trained twice"]
    lines += [f"VIOLATION    {text}" for text in found.violations]
    more = found.num_violations - len(found.violations)
    return [*lines, *([f"             and {more} more"] if more else [])]


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """None: a line is not whole."""
    with file.open("rb") as lines:
        for place, line in enumerate(lines):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield place, record if isinstance(record, dict) else None
