# SPDX-License-Identifier: Apache-2.0
"""Where a version is announced on the trainer's host, once its checksums are known.

A gather returns as soon as the weights are copied, with a `Ticket`. A thread of the trainer's then computes
the
checksums beside the next optimizer step and posts the manifest on the board that the ticket names.
"""

from __future__ import annotations

import os
import time
from multiprocessing import resource_tracker

import psutil

from ..errors import WeightSyncError
from .manifest import MAX_BYTES, Failure, Manifest, Ticket, decode_announcement
from .segment_names import SHM_DIR, check_name, new_name, open_own

POLL_S = 0.001
"""How often a reader looks. It is a thread that waits for a thread of another process."""


class Board:
    """A small file in shared memory that one process writes, as a whole, and others on its host read."""

    def __init__(self, name: str | None = None) -> None:
        """With a name: the board that another process writes. Raises WeightSyncError: not ours by name."""
        self._owner = name is None
        self.name = name or new_name()
        check_name(self.name)
        self._path = SHM_DIR / self.name
        if self._owner:
            resource_tracker.register(f"/{self.name}", "shared_memory")

    def read(self) -> bytes | None:
        """What is posted; None if nothing is. Raises WeightSyncError: somebody else wrote it."""
        try:
            fd = open_own(self.name, os.O_RDONLY)
        except WeightSyncError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        with open(fd, "rb") as file:
            return file.read(MAX_BYTES + 1)

    def post(self, data: bytes) -> None:
        """Readers see this or what was there before, never a part."""
        part = SHM_DIR / new_name()
        with open(part, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(data)
        os.replace(part, self._path)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Clear it for good."""
        self.clear()
        if self._owner:
            self._owner = False
            resource_tracker.unregister(f"/{self.name}", "shared_memory")


def await_manifest(ticket: Ticket, timeout_s: float) -> Manifest:
    """Wait until a version is announced, and return its manifest. Blocks; for a thread.

    Raises WeightSyncError: its memory was taken by a newer one, or the trainer failed, died or took too long.
    """
    board, deadline = Board(ticket.board), time.monotonic() + timeout_s
    while True:
        # Asked first: who posts and then ends has posted.
        alive = psutil.pid_exists(ticket.pid)
        data = board.read()
        if data is not None:
            found = decode_announcement(data)
            if isinstance(found, Failure):
                raise WeightSyncError(f"v{ticket.version} was gathered, but then: {found.reason}")
            if found.version != ticket.version:
                raise WeightSyncError(
                    f"v{ticket.version} is in memory no more; v{found.version} took its place"
                )
            return found
        if not alive:
            raise WeightSyncError(
                f"the trainer's process {ticket.pid} died before v{ticket.version} was complete"
            )
        if time.monotonic() > deadline:
            raise WeightSyncError(
                f"v{ticket.version} was gathered, but process {ticket.pid} did not finish its checksums "
                f"within {timeout_s:g} s"
            )
        time.sleep(POLL_S)
