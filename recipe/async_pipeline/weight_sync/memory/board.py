# SPDX-License-Identifier: Apache-2.0
"""Where a version is announced on the trainer's host, once its checksums are known.

A gather returns a `WeightTicket` as soon as the weights are copied. A thread of the trainer then computes the
checksums during the next optimizer step and posts the manifest on the board that the ticket names.
"""

from __future__ import annotations

import os
import time
from multiprocessing import resource_tracker

import psutil

from ...errors import WeightSyncError
from .manifest import MAX_BYTES, Announcement, Failure, Manifest, WeightTicket, decode_announcement
from .segment_names import SHM_DIR, check_name, new_name, open_own

POLL_S = 0.001
"""Polling interval of a reader: a thread that waits for a thread of another process."""


class Board:
    """A small file in shared memory: one process writes it as a whole, others on the same host read it."""

    def __init__(self, name: str | None = None) -> None:
        """Create a board, or open the one that another process writes, by name.

        Raises WeightSyncError if `name` is not one of this package's segment names.
        """
        self._owner = name is None
        self.name = name or new_name()
        check_name(self.name)
        self._path = SHM_DIR / self.name
        if self._owner:
            resource_tracker.register(f"/{self.name}", "shared_memory")

    def read(self) -> bytes | None:
        """Return the posted bytes, or None. Raises WeightSyncError if another user wrote them."""
        try:
            fd = open_own(self.name, os.O_RDONLY)
        except WeightSyncError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        with open(fd, "rb") as file:
            return file.read(MAX_BYTES + 1)

    def post(self, data: bytes) -> None:
        """Replace the content atomically: readers see the old bytes or the new ones, never a part."""
        part = SHM_DIR / new_name()
        with open(part, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(data)
        os.replace(part, self._path)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Clear the board for the last time."""
        self.clear()
        if self._owner:
            self._owner = False
            resource_tracker.unregister(f"/{self.name}", "shared_memory")


def await_manifest(ticket: WeightTicket, timeout_s: float) -> Manifest:
    """Wait until a version is announced and return its manifest. Blocks, so call it in a thread.

    Raises WeightSyncError if `await_announcement` does, or if this host has a share of the version only.
    """
    found = await_announcement(ticket, timeout_s)
    if not isinstance(found, Manifest):
        raise WeightSyncError(f"v{ticket.version} is spread over several training hosts")
    return found


def await_announcement(ticket: WeightTicket, timeout_s: float) -> Announcement:
    """Wait until a training host has announced its share of a version, or all of it. Blocks.

    Raises WeightSyncError if a newer version took its memory, or if the trainer failed, died or took too
    long.
    """
    board, deadline = Board(ticket.board), time.monotonic() + timeout_s
    while True:
        # Check this before reading: a process that posts and then ends has posted.
        alive = psutil.pid_exists(ticket.pid)
        data = board.read()
        if data is not None:
            found = decode_announcement(data)
            if isinstance(found, Failure):
                raise WeightSyncError(
                    f"v{ticket.version} was gathered, but its announcement failed: {found.reason}"
                )
            if found.version != ticket.version:
                raise WeightSyncError(
                    f"v{ticket.version} is no longer in memory; v{found.version} took its place"
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
