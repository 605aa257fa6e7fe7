# SPDX-License-Identifier: Apache-2.0
"""Requests to a running run about its replicas, and its answers, as files of a folder of the run directory.

Both are JSON objects and appear atomically. The folder exists while a run takes requests.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import RunFilesError, WaitTimeout
from .summary import write_atomically

FOLDER = "replicas"
POLL_S = 0.1
"""Interval at which the command looks for its answer."""


def ask(run_dir: Path, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return the run's answer to a request. Blocks.

    Raises RunFilesError if no run takes requests there, and WaitTimeout if the run does not answer in time.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir():
        raise RunFilesError(f"{run_dir} has no run that takes requests (no {FOLDER}/); name a running run's")

    name = uuid.uuid4().hex
    asked, answered = folder / f"request-{name}.json", folder / f"answer-{name}.json"
    deadline = time.monotonic() + timeout_s
    try:
        write_atomically(asked, dict(request))
        while time.monotonic() < deadline:
            if answered.exists():
                return _object(answered)
            time.sleep(POLL_S)
    except FileNotFoundError:
        raise RunFilesError(f"the run in {run_dir} has ended; name a running run's directory") from None
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    raise WaitTimeout(f"the run in {run_dir} did not answer within {timeout_s:g} s; check that it still runs")


def open_folder(folder: Path) -> None:
    """Start to take requests; requests to an earlier process are dropped."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.json"):
        path.unlink(missing_ok=True)


def close_folder(folder: Path) -> None:
    """Take no more requests."""
    for path in folder.glob("*"):
        path.unlink(missing_ok=True)
    folder.rmdir()


def take(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Remove and return the requests, each with the path of its answer. Unreadable ones are dropped."""
    found = []
    for path in sorted(folder.glob("request-*.json")):
        try:
            request = _object(path)
        except RunFilesError:
            request = {}
        path.unlink(missing_ok=True)
        found.append((path.with_name(path.name.replace("request", "answer", 1)), request))
    return found


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFilesError(f"{path} cannot be read ({error}); repeat the request") from None
    if not isinstance(value, dict):
        raise RunFilesError(f"{path} holds no JSON object; repeat the request")
    return value
