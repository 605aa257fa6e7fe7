# SPDX-License-Identifier: Apache-2.0
"""The folders in which agents run: one for each episode, deleted with it, also after a kill of their owner.

    new-PREFIX-XXX ──mark, lock, rename──► PREFIX-XXX ──end of the episode──► deleted by its owner
                                              └─ its owner is killed: the kernel drops the lock ──► deleted by
                                                 the next process that makes such a folder in the same place

Folders of other programs may have the same prefix: only one that has the mark inside is deleted. A lock, and
not the number of a process, tells whether a folder has an owner: containers number their processes
independently, and may share a folder for temporary files.
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

PREFIX = "async_pipeline-episode-"
MARK = ".async_pipeline_episode"
"""An empty file in each folder."""
_UNNAMED = f"new-{PREFIX}"
"""Until a folder is locked: others leave it alone."""
_swept: set[str] = set()
_sweeping = threading.Lock()


class Folder:
    """The folder of one episode. Leaving the context deletes it, in a thread."""

    def __init__(self) -> None:
        self.path = Path()
        self._lock: int | None = None
        self._making: asyncio.Future[None] | None = None

    async def make(self, name: str | None = None, content: Mapping[str, Any] | None = None) -> None:
        """Make it, with an object in a named file. The first of a process also deletes abandoned ones."""
        text = json.dumps(content, ensure_ascii=False)
        self._making = asyncio.get_running_loop().run_in_executor(None, self._make, name, text)
        # A thread cannot be stopped: the folder is deleted when it has been made.
        await asyncio.shield(self._making)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._making is None:
            return
        if self._making.done():
            self._delete_in_thread()
        else:
            self._making.add_done_callback(self._delete_in_thread)

    def _delete_in_thread(self, *_: object) -> None:
        asyncio.get_running_loop().run_in_executor(None, self._delete)

    def _make(self, name: str | None, text: str) -> None:
        place = tempfile.gettempdir()
        with _sweeping:
            if place not in _swept:
                _swept.add(place)
                delete_abandoned(Path(place))
        self.path = Path(tempfile.mkdtemp(prefix=_UNNAMED))
        (self.path / MARK).touch()
        self._lock = _locked(self.path)
        self.path = self.path.rename(self.path.with_name(self.path.name.removeprefix("new-")))
        if name is not None:
            (self.path / name).write_text(text, encoding="utf-8")

    def _delete(self) -> None:
        if self.path != Path():
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
            if not (folder / MARK).is_file():
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
