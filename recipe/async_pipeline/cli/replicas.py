# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline replicas RUN`: list the rollout replicas of a running run, add some, or remove one.

The run answers through files in its directory, so the command needs no connection to Ray. A replica that is
added serves when it has loaded and verified the newest weights; list the replicas to see when. One that is
removed finishes its open requests first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..console import echo
from ..errors import WeightSyncError
from ..observe.run_directory.replica_requests import ask

TIMEOUT_S = 30.0
"""Seconds that a run gets to answer. It looks for requests every second."""
COLUMNS = ("name", "node", "state", "version", "open_requests", "load_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline replicas`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a running run")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--add", type=int, metavar="N", help="start N replicas on free devices")
    change.add_argument("--remove", metavar="NAME", help='remove a replica, such as "replica 1"')
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the answer. Raises RunFilesError without a run, and WeightSyncError if the run refuses."""
    request: dict[str, Any] = {"action": "list"}
    if args.add is not None:
        request = {"action": "add", "count": args.add}
    elif args.remove is not None:
        request = {"action": "remove", "name": args.remove}

    answer = ask(args.run, request, TIMEOUT_S)
    if "error" in answer:
        raise WeightSyncError(str(answer["error"]))
    for line in [json.dumps(answer, indent=2)] if args.json else render_answer(answer):
        echo(line)
    return 0


def render_answer(answer: dict[str, Any]) -> Iterator[str]:
    """Return the answer as lines of text."""
    for name in answer.get("added", ()):
        yield f"{name} is starting"
    if "removed" in answer:
        yield f"{answer['removed']} finishes its open requests and ends"
    rows = [[column.removesuffix("_s").replace("_", " ") for column in COLUMNS]]
    rows += [[_cell(row.get(column)) for column in COLUMNS] for row in answer.get("replicas", ())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for row in answer.get("replicas", ()):
        if row.get("why"):
            yield f"{row['name']}: {row['why']}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if isinstance(value, float) else str(value)
