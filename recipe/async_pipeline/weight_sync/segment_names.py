# SPDX-License-Identifier: Apache-2.0
"""Names of shared-memory segments, and the sweep of those whose owner is gone. Imports no torch."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ..errors import WeightSyncError

SHM_DIR = Path("/dev/shm")
PREFIX = "async_pipeline-"
NAME_MAX = 255
"""Linux's limit."""


def new_name() -> str:
    """A random name that says which process owns the segment."""
    return f"{PREFIX}{_pid_namespace()}-{os.getpid()}-{secrets.token_hex(8)}"


def check_name(name: str) -> None:
    """Raises WeightSyncError: a name that came from elsewhere is not one of ours."""
    if not name.startswith(PREFIX) or "/" in name or "\0" in name or len(name) > NAME_MAX:
        raise WeightSyncError(f"{name!r} is not a segment of this pipeline")


def open_own(name: str, flags: int = os.O_RDWR) -> int:
    """A descriptor of shared memory that this user made, and nobody else can read.

    Raises WeightSyncError: not ours by name, missing, a link, or of somebody else.
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
            "be ours alone"
        )
    return fd


def sweep_orphans() -> list[str]:
    """Unlink segments of processes that are gone; returns their names.

    Ray kills a worker together with the tracker that would have cleaned up after it. Only our own
    user's segments of our own process namespace are touched.
    """
    swept = []
    for path in SHM_DIR.glob(f"{PREFIX}{_pid_namespace()}-*"):
        pid = path.name.removeprefix(PREFIX).split("-")[1]
        if not Path(f"/proc/{pid}").exists() and path.stat().st_uid == os.getuid():
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return swept


def _pid_namespace() -> int:
    """Identifies the process ids that this process can see; containers may share memory but not these."""
    return os.stat("/proc/self/ns/pid").st_ino
