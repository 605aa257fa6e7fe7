# SPDX-License-Identifier: Apache-2.0
"""Failed attempts at episodes, with what their agents wrote: `agent_output/EPISODE-attempt-N.txt` of a run.

The first line of a file is JSON: episode, attempt, step, end and why. The output follows, if there is any.
The newest files are kept, older ones are removed; a resumed run continues in the same folder.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FOLDER = "agent_output"
MAX_FILES = 200
"""Of at most 64 KiB and a first line each."""


class FailedAttempt(NamedTuple):
    """An attempt at an episode that was not trained, with what its commands wrote, if it had any."""

    episode: str
    """Its key: prompt and session."""
    attempt: int
    end: str
    why: str
    output: str


class KeptOutput(NamedTuple):
    """A file of the folder, without the output."""

    path: Path
    episode: str
    attempt: int
    end: str
    why: str


def name_of(episode: str, attempt: int) -> str:
    """Return the name of the file of an attempt."""
    name = re.sub(r"[^\w.-]", "-", episode)
    return f"{name}-attempt-{attempt}.txt"


class AgentOutputFolder:
    """Writes the folder; made with the first file. May be called from any thread."""

    def __init__(self, run_dir: Path, max_files: int = MAX_FILES) -> None:
        self._path, self._max_files = run_dir / FOLDER, max_files
        self._lock = threading.Lock()

    def add(self, step: int, failed: Iterable[FailedAttempt]) -> None:
        """Write the output of attempts at episodes that were begun for a step. Raises OSError."""
        with self._lock:
            self._path.mkdir(parents=True, exist_ok=True)
            for one in failed:
                about = {name: value for name, value in one._asdict().items() if name != "output"}
                first = json.dumps({**about, "step": step}, ensure_ascii=False)
                file = self._path / name_of(one.episode, one.attempt)
                file.write_text(f"{first}\n{one.output}", encoding="utf-8", errors="replace")
            for old in _by_age(self._path)[: -self._max_files]:
                old.unlink(missing_ok=True)


def read_outputs(run_dir: Path) -> list[KeptOutput]:
    """Return the files of a run, the newest last. Skips unreadable ones."""
    found = []
    for path in _by_age(run_dir / FOLDER):
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                about = json.loads(lines.readline())
            found.append(
                KeptOutput(
                    path,
                    str(about["episode"]),
                    int(about["attempt"]),
                    str(about["end"]),
                    str(about["why"]),
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _by_age(folder: Path) -> list[Path]:
    """Return the files of the folder, the oldest first; none without a folder."""

    def age(path: Path) -> tuple[int, str]:
        with suppress(FileNotFoundError):  # another process may have removed it
            return path.stat().st_mtime_ns, path.name
        return 0, path.name

    return sorted(folder.glob("*-attempt-*.txt"), key=age)
