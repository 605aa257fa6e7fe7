# SPDX-License-Identifier: Apache-2.0
"""The folders in which agents run: one for each episode, deleted with it, also after a kill of their owner.

    new-episode-XXX ──lock, rename──► episode-XXX ──end of the episode──► deleted by its owner
                                          └─ its owner is killed: the kernel drops the lock ──► deleted by the
                                             next process that makes such a folder in the same place

A lock, and not the number of a process, tells whether a folder has an owner: containers number their
processes independently, and may share a folder for temporary files.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFIX = "episode-"
_UNNAMED = f"new-{PREFIX}"
"""Until a folder is locked: others leave it alone."""
_swept: set[str] = set()
_sweeping = threading.Lock()


class Folder:
    """The folder of one episode. Leaving the context deletes it, in a thread."""

    def __init__(self) -> None:
        self.path = Path()
        self._lock: int | None = None

    async def make(self, name: str, content: Mapping[str, Any]) -> None:
        """Make it, with an object in a file. The first one of a process also deletes the abandoned ones."""
        await asyncio.get_running_loop().run_in_executor(None, self._make)
        await self.write(name, content)

    async def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write an object into a file."""
        text = json.dumps(content, ensure_ascii=False)
        file = self.path / name
        await asyncio.get_running_loop().run_in_executor(
            None, lambda: file.write_text(text, encoding="utf-8")
        )

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self.path != Path():
            asyncio.get_running_loop().run_in_executor(None, self._delete)

    def _make(self) -> None:
        place = tempfile.gettempdir()
        with _sweeping:
            if place not in _swept:
                _swept.add(place)
                delete_abandoned(Path(place))
        made = Path(tempfile.mkdtemp(prefix=_UNNAMED))
        self._lock = _locked(made)
        self.path = made.rename(made.with_name(made.name.removeprefix("new-")))

    def _delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def delete_abandoned(place: Path) -> int:
    """Delete the folders of this user's episodes whose owner is gone; returns how many there were."""
    count = 0
    for folder in place.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.geteuid():
                continue
        except OSError:  # another process has deleted it
            continue
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            count += 1
    return count


def _locked(folder: Path) -> int | None:
    """Lock a folder until the returned file is closed; None if another process has, or if it cannot be."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
