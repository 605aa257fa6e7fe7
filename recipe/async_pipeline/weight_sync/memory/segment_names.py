# SPDX-License-Identifier: Apache-2.0
"""Names of shared-memory segments, and the sweep of segments whose owner is gone. Imports no torch.

An owner is a process. It has a random number and locks that byte of one file of its user for its lifetime.
Containers that share memory see each other's locks, unlike each other's process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import secrets
import threading
from multiprocessing import shared_memory
from pathlib import Path

from ...errors import WeightSyncError

SHM_DIR = Path("/dev/shm")
PREFIX = "async_pipeline-"
OF_ENGINES = "async_pipeline_engine-"
"""Of the segments in which the processes of an engine pass messages."""
LOCKS = "async_pipeline.{}.locks"
"""By user. Without the prefix of segments, because it stays."""
NAME_MAX = 255
"""Linux's limit."""


_OWNED = re.compile(rf"(?:{PREFIX}|{OF_ENGINES})([0-9a-f]{{15}})-\d+-[0-9a-f]{{16}}")


class _Owner:
    """This process, as an owner."""

    def __init__(self) -> None:
        self._locking = threading.Lock()
        self._number: str | None = None

    def number(self) -> str:
        """Return the number, whose byte this process has locked."""
        with self._locking:
            if self._number is None:
                number = secrets.token_hex(8)[1:]
                # Unlike `flock`, such a lock is not inherited by a fork, which may outlive the owner.
                fcntl.lockf(_locks(), fcntl.LOCK_EX, 1, int(number, 16))
                self._number = number
            return self._number

    def forget(self) -> None:
        """Become another owner, in a fork."""
        self.__init__()  # type: ignore[misc]


_this_process = _Owner()
os.register_at_fork(after_in_child=_this_process.forget)


def new_name(prefix: str = PREFIX) -> str:
    """Return a random name that contains the owner's number and process id.

    Raises WeightSyncError if the locks of this user's processes cannot be used.
    """
    return f"{prefix}{_this_process.number()}-{os.getpid()}-{secrets.token_hex(8)}"


def name_segments_of_engine() -> None:
    """Let the segments that Python's `shared_memory` makes in this process be swept if it is killed.

    Ray kills a process together with the one that would unlink them: two ranks of vLLM leave 700 MB, two of
    SGLang 48 MiB.
    """
    setattr(shared_memory, "_make_filename", lambda: f"/{new_name(OF_ENGINES)}")  # noqa: B010


def check_name(name: str) -> None:
    """Raise WeightSyncError if a name from another process does not have this package's format."""
    if not name.startswith(PREFIX) or "/" in name or "\0" in name or len(name) > NAME_MAX:
        raise WeightSyncError(f"{name!r} is not the name of a segment of this package")


def open_own(name: str, flags: int = os.O_RDWR) -> int:
    """Open shared memory that this user made and no other user can read.

    Raises WeightSyncError if the name is foreign, or the file is missing, a link or another user's.
    """
    check_name(name)
    try:
        fd = os.open(SHM_DIR / name, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(f"shared memory {name}: {error.strerror}") from error
    return _private(fd, name)


def sweep_orphans() -> list[str]:
    """Unlink segments of processes that are gone; return their names.

    Python's resource tracker unlinks the segments of a process that dies alone. Ray kills a worker together
    with its tracker, and a container ends with all of its processes; their segments stay until the next
    process that owns versions starts where this memory is shared, or `async-pipeline watch` ends there. Only
    segments of this user are touched. Raises WeightSyncError if the locks cannot be used.
    """
    alive, swept = {_this_process.number(): True}, []
    for path in SHM_DIR.glob("async_pipeline*"):
        named = _OWNED.fullmatch(path.name)
        # After a killed run, several processes sweep at the same time.
        with contextlib.suppress(FileNotFoundError):
            if named is None or path.lstat().st_uid != os.getuid():
                continue
            owner = named[1]
            if owner not in alive:
                alive[owner] = _is_locked(owner)
            if not alive[owner]:
                path.unlink()
                swept.append(path.name)
    return swept


def _is_locked(owner: str) -> bool:
    """Return whether another process has locked the byte of an owner.

    A user namespace that shares this memory has another number for this user, and so another file of locks.
    """
    place = int(owner, 16)
    _locks()
    for path in SHM_DIR.glob(LOCKS.format("*")):
        if path.lstat().st_uid != os.geteuid():
            continue
        fd = _opened(path.name)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, place)
    return False


def _locks() -> int:
    """Return the descriptor of the file in which processes of this user lock their bytes."""
    return _opened(LOCKS.format(os.geteuid()))


@functools.cache
def _opened(name: str) -> int:
    """Return a descriptor that stays open: closing any of a file ends all locks of the process on it."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(SHM_DIR / name, flags, 0o600)
    except OSError as error:
        raise WeightSyncError(f"shared memory {name}: {error.strerror}; remove it") from error
    return _private(fd, name)


def _private(fd: int, name: str) -> int:
    """Return a descriptor. Raises WeightSyncError if its file is another user's or open to others."""
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(fd)
        raise WeightSyncError(
            f"shared memory {name} is of user {found.st_uid} with mode {found.st_mode & 0o777:o}; it must "
            "be private to this user"
        )
    return fd
