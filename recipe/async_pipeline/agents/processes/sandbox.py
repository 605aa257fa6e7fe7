# SPDX-License-Identifier: Apache-2.0
"""The folders of episodes, and what commands of agents do not see: other processes, and files of the run.

`command_process` has the means for the latter.

A hidden folder is an empty one for the command, which is in memory and ends with it; a hidden file is empty.
What the command needs of them is there again, read-only, and so are its own folders, which it may write.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .commands import try_command

PREFIX = "async_pipeline-episode-"
MARK = ".async_pipeline_episode"
"""An empty file in each folder."""
_UNNAMED = f"new-{PREFIX}"
"""Until a folder is locked: others leave it alone."""
_swept: set[str] = set()
_sweeping = threading.Lock()


class Folder:
    """The folder of one episode, deleted with it, also after a kill of its owner.

    Leaving the context deletes it, in a thread.

        new-PREFIX-XXX ──mark, lock, rename──► PREFIX-XXX ──end of the episode──► deleted by its owner
                                                  └─ its owner is killed: the kernel drops the lock ──►
                                 deleted by the next process that makes such a folder in the same place

    Folders of other programs may have the same prefix: only one that has the mark inside is deleted. A lock,
    and not the number of a process, tells whether a folder has an owner: containers number their processes
    independently, and may share a folder for temporary files.
    """

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


TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
SECRETS = (
    "~/.ray",
    "~/.cache/huggingface",
    "~/.cache/verl",
    "~/.huggingface",
    "~/.ssh",
    "~/.aws",
    "~/.netrc",
)
"""Ray's token, with which anyone runs code in the cluster; keys of hubs and hosts; copies of data sets."""
SECRET_VARIABLES = ("RAY_AUTH_TOKEN_PATH", "HF_HOME", "HF_TOKEN_PATH", "HF_DATASETS_CACHE")
"""Variables that name further ones."""
TRY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """What commands of a run do not see."""

    hidden: tuple[str, ...]
    """Absolute paths, without links."""
    offline: bool = False
    """Whether they have no network but the gateway."""

    @classmethod
    def of(cls, paths: Iterable[str | os.PathLike[str]], offline: bool = False) -> Sandbox:
        """Hide paths of a run, and what no command may read: temporary folders, and secrets of the user."""
        named = (os.environ[name] for name in SECRET_VARIABLES if os.environ.get(name))
        every = (*paths, *TEMPORARY, tempfile.gettempdir(), *SECRETS, *named)
        return cls(hidden=tuple(sorted({_real(path) for path in every} - {"/"})), offline=offline)

    def mounts(
        self,
        command: Sequence[str],
        writable: Iterable[Path],
        shown: Iterable[str] = (),
        gateway: str = "",
    ) -> dict[str, Sequence[str]]:
        """Return the mounts of a command; see `command_process.hide`.

        `writable`: its folders. `shown`: what it may read of the hidden, besides what it names. `gateway`:
        host:port, of which it has the port on 127.0.0.1 if it is offline.
        """
        mounts: dict[str, Sequence[str]] = {
            "hidden": self.hidden,
            "shown": [*shown, *self._needed(command)],
            "writable": [str(path) for path in writable],
        }
        return {**mounts, "gateway": gateway} if self.offline else mounts

    def _needed(self, command: Sequence[str]) -> list[str]:
        """Return which hidden paths a command needs: its virtual environment, and the folders of its files.

        Of a file that is right in a hidden folder it is the file only, and of a hidden folder nothing.
        """
        real, found = _real(command[0]), set()
        for program in (command[0], real):
            binaries, _ = os.path.split(program)
            found.add(os.path.dirname(binaries) if os.path.basename(binaries) == "bin" else binaries)
        for word in (*command, real):
            if os.path.isabs(word) and os.path.exists(word):
                folder = word if os.path.isdir(word) else os.path.dirname(word)
                if _real(folder) not in self.hidden:
                    found.add(folder)
                elif folder != word:
                    found.add(word)
        return sorted(one for one in found if self._is_below_hidden(_real(one)))

    def _is_below_hidden(self, path: str) -> bool:
        return any(path.startswith(f"{hidden}{os.sep}") for hidden in self.hidden)


@functools.cache
def reason_without(offline: bool = False) -> str:
    """Return why this machine has no sandbox, or nothing if it has. The first call tries it, and blocks."""
    if sys.platform != "linux":
        return f"{platform.system()} has no namespaces"
    command = ["/bin/true"]
    try:
        finished = try_command(command, Sandbox.of((), offline).mounts(command, ()), TRY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if finished.status == 0 else finished.describe()


def _real(path: str | os.PathLike[str]) -> str:
    return os.path.realpath(os.path.expanduser(path))
