# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline ledger RUN`: verify a run's ledger. Exit status 0 if it is consistent, 1 if not.

An incomplete line is no violation where a process was killed: at the end of the file, or before the first
record of the process that resumed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...console import echo
from ...observe.run_directory.agent_output import MAX_FILES, KeptOutput, read_outputs
from ..ledger.audit import Audit
from ..ledger.file import NAME, audit_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline ledger`."""
    parser.add_argument(
        "run", type=Path, metavar="RUN", help=f"a run directory, such as outputs/smoke/latest, or its {NAME}"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the result. Raises ConfigError if there is no ledger."""
    found = audit_file(args.run)
    failed = read_outputs(args.run if args.run.is_dir() else args.run.parent)
    for line in [json.dumps(found.as_dict(), indent=2)] if args.json else render_audit(found, failed):
        echo(line)
    return 0 if found.ok else 1


def render_audit(found: Audit, failed: Sequence[KeptOutput] = ()) -> list[str]:
    """Return the result as lines of text. `failed`: the failed attempts at episodes that the run has kept."""
    if found.ok and found.processes == 0:
        return ["run          ended before its first step; its ledger has no record", *_attempts(failed)]
    state = {"completed": "completed", "running": "has not ended, or was killed"}.get(
        found.status, found.status
    )

    times = found.processes - 1 + found.begun_elsewhere
    resumed = f", resumed {'once' if times == 1 else f'{times} times'}" if times else ""
    elsewhere = "; earlier steps are in another ledger" if found.begun_elsewhere else ""
    again = f"; {found.void} records are void" if found.void else ""
    repeated = f", {found.episodes_repeated} failed episodes were repeated" if found.episodes_repeated else ""
    repeated += (
        f", {found.episodes_redundant} redundant episodes were ended" if found.episodes_redundant else ""
    )
    ends = ", ".join(f"{count} {end}" for end, count in sorted(found.ends.items()))
    lines = [
        f"run          {state} after step {found.steps}{resumed}{again}",
        f"prompts      {found.dispatched} dispatched = {found.trained} trained + {found.filtered} filtered + "
        f"{found.expired} expired + {found.failed} failed + {found.in_flight} in flight",
        f"responses    {found.trajectories_trained} trained{elsewhere}; {found.regenerated} prompts were "
        f"generated again{repeated}",
        *([f"episodes     ended early: {ends}"] if ends else []),
        *_attempts(failed),
        f"lag          at most {found.lag_max}; {found.max_lag} is allowed",
    ]

    if found.ok:
        return [*lines, "ok           every prompt has one fate, no response was trained twice"]
    lines += [f"VIOLATION    {text}" for text in found.violations]
    more = found.num_violations - len(found.violations)
    return [*lines, *([f"             and {more} more"] if more else [])]


def _attempts(failed: Sequence[KeptOutput]) -> Iterator[str]:
    """Yield failed attempts by end, each with its most frequent reason, and where they are."""
    if not failed:
        return
    kept = f"; the newest {MAX_FILES} are kept" if len(failed) >= MAX_FILES else ""
    yield f"attempts     {len(failed)} failed; see {failed[-1].path.parent}{kept}"
    for end, count in Counter(one.end for one in failed).most_common():
        why, times = Counter(one.why for one in failed if one.end == end).most_common(1)[0]
        yield f"             {count} {end}, {times} of them: {why}"
