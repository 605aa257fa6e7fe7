# SPDX-License-Identifier: Apache-2.0
"""Names of shared-memory segments, and the sweep of segments whose owner is gone. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from ..errors import WeightSyncError

SHM_DIR = Path("/dev/shm")
PREFIX = "async_pipeline-"
NAME_MAX = 255
"""Linux's limit."""


def new_name() -> str:
    """Return a random name that contains the owner's process id."""
    return f"{PREFIX}{_pid_namespace()}-{os.getpid()}-{secrets.token_hex(8)}"


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
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(fd)
        raise WeightSyncError(
            f"shared memory {name} is of user {found.st_uid} with mode {found.st_mode & 0o777:o}; it must "
            "be private to this user"
        )
    return fd


def sweep_orphans() -> list[str]:
    """Unlink segments of processes that are gone; return their names.

    Python's resource tracker unlinks the segments of a process that dies alone. Ray kills a worker together
    with its tracker; their segments stay until the next process on this host that owns versions starts, or
    `async-pipeline watch` ends there. Only segments of this user and this process namespace are touched.
    """
    swept = []
    for path in SHM_DIR.glob(f"{PREFIX}{_pid_namespace()}-*"):
        pid = path.name.removeprefix(PREFIX).split("-")[1]
        if Path(f"/proc/{pid}").exists():
            continue
        # After a killed run, several processes sweep at the same time.
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.getuid():
                path.unlink()
                swept.append(path.name)
    return swept


def _pid_namespace() -> int:
    """Identify the process ids that this process can see; containers may share memory but not process
    ids.
    """
    return os.stat("/proc/self/ns/pid").st_ino
