# SPDX-License-Identifier: Apache-2.0
"""Give the run directory and the folder of checkpoints to one run at a time.

    .owner      locked by the driver, from before anything is written there until it ends
    .trainer    locked by the trainer's process, which may be on another host, and may outlive the driver

The kernel releases a lock when its process ends, however it ends, on shared file systems too. A file system
without locks is used without; the caller gets a line about it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..config.paths import OWN
from ..errors import ConfigError

DRIVER, TRAINER = ".owner", ".trainer"
RUN_DIR, ROOT = f"{OWN}.run_dir", "trainer.default_local_dir"
"""The keys of the folders."""
ENDS_S = 30.0
"""Seconds in which the trainer's process of a driver that has ended ends too; Ray sees to that."""
POLL_S = 0.1
_held: dict[Path, int] = {}
"""Descriptors of the locks of this process, which keeps them until it ends."""


def own(folders: Mapping[str, Path], say: Callable[[str], object]) -> None:
    """Take folders, by the key that names them, for the driver of a run. Creates them.

    `say` receives a line for a file system without locks. Raises ConfigError, with the owner, if another run
    has a folder, or if it cannot be written to, as on a full disk.
    """
    # A run that is refused leaves nothing behind: what another one may have comes first.
    for key, folder in sorted(folders.items(), key=lambda one: not one[1].exists()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_writable(key, folder, error) from None
        hold(key, folder, DRIVER, say)
        # A trainer whose driver was killed still writes until Ray ends it.
        held = _lock(key, folder, TRAINER, ENDS_S, say)
        if held is not None:
            os.close(held)


def hold(key: str, folder: Path, name: str, say: Callable[[str], object]) -> None:
    """Lock one of the files until this process ends; no-op if it has the lock. Raises as `own`."""
    path = (folder / name).resolve()
    if path not in _held and (descriptor := _lock(key, folder, name, 0.0, say)) is not None:
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_self()).encode(), 0)
        except OSError as error:  # its disk is full
            os.close(descriptor)
            raise _not_writable(key, folder, error) from None
        _held[path] = descriptor


def _lock(key: str, folder: Path, name: str, patience_s: float, say: Callable[[str], object]) -> int | None:
    """Return the descriptor of a lock, or None if the file system has none or this process has it."""
    path = folder / name
    if path.resolve() in _held:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _not_writable(key, folder, error) from None

    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(POLL_S)
                continue
            owner = _owner(descriptor)
            os.close(descriptor)
            raise ConfigError(
                f"{key} must be the folder of one run at a time, got {folder}, which belongs to {owner}; end "
                "that run or wait for its end, or set another folder"
            ) from None
        except OSError as error:
            os.close(descriptor)
            say(f"{folder} cannot be locked ({error.strerror}); do not start a second run in it")
            return None


def _not_writable(key: str, folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{key} must be a writable folder, got {folder} ({error.strerror}); set another one")


def _self() -> dict[str, str | int]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _owner(descriptor: int) -> str:
    """Describe the process that has the lock; it may just be writing who it is."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
