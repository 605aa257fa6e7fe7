# SPDX-License-Identifier: Apache-2.0
"""Which of a host's two slots holds which version, who reads it, and which may be filled. No tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from ...errors import WeightSyncError

NUM_SLOTS = 2
"""Versions that a host keeps."""
SAME_START_S = 5.0
"""Largest difference between two readings of when a process started."""


class Reader(NamedTuple):
    """A process on this host that reads a version."""

    name: str
    pid: int
    started: float
    """When the process started; process ids are reused."""

    def is_same(self, other: Reader) -> bool:
        """Return whether this is the same part of the same process."""
        return (self.name, self.pid) == (other.name, other.pid)


def running(pid: int, started: float) -> psutil.Process | None:
    """Return the process of this host with that id and start time, or None if it has ended."""
    try:
        process = psutil.Process(pid)
        # Derived from the time of boot, which may be adjusted by a second while the machine runs.
        same = abs(process.create_time() - started) < SAME_START_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def runs(reader: Reader) -> bool:
    """Return whether a process of this host still runs."""
    return running(reader.pid, reader.started) is not None


def this_process(name: str) -> Reader:
    """Return this process as a reader."""
    process = psutil.Process()
    return Reader(name, process.pid, process.create_time())


@dataclass
class ReadLease:
    """Permission to read one version until a deadline."""

    reader: Reader
    version: int
    until: float


class HostSlots:
    """Two slots. A slot is filled only if it does not hold the newest version and no lease is on it."""

    def __init__(self, alive: Callable[[Reader], bool]) -> None:
        """`alive` tells whether a process still runs: the leases of a dead one have ended."""
        self._alive = alive
        self._versions: list[int | None] = [None] * NUM_SLOTS
        self._filling: tuple[int, int] | None = None
        """Slot and version of the open fill."""
        self._leases: list[ReadLease] = []

    @property
    def versions(self) -> list[int]:
        """The complete versions, in ascending order."""
        return sorted(version for version in self._versions if version is not None)

    def holding(self, version: int) -> int | None:
        """Return the slot of a complete version, or None."""
        return self._versions.index(version) if version in self._versions else None

    def lease(self, reader: Reader, version: int, until: float) -> None:
        """Protect a version, also one that is still to be received, until `release` or the deadline.

        A reader has one lease: a new one ends its older one.
        """
        self._leases = [lease for lease in self._leases if not lease.reader.is_same(reader)]
        self._leases.append(ReadLease(reader, version, until))

    def release(self, reader: Reader, version: int) -> None:
        """End a lease, if it still exists."""
        self._leases = [
            lease for lease in self._leases if lease.version != version or not lease.reader.is_same(reader)
        ]

    def readers(self, version: int, now: float) -> list[str]:
        """Return the names of the processes that read a version; forget leases that have ended."""
        self._leases = [lease for lease in self._leases if lease.until > now and self._alive(lease.reader)]
        return [lease.reader.name for lease in self._leases if lease.version == version]

    def in_the_way(self, now: float) -> dict[int, list[str]]:
        """Return the versions whose memory the next fill could take, with the readers that prevent it.

        Empty if a slot is free to be filled.
        """
        candidates = self._candidates()
        busy = {v: readers for v in candidates if v is not None and (readers := self.readers(v, now))}
        return busy if len(busy) == len(candidates) else {}

    def begin_fill(self, version: int, now: float) -> int:
        """Return the slot to write `version` into; what it held is gone.

        Raises WeightSyncError if another fill is open, the version is here, or no slot is free.
        """
        if self._filling is not None:
            raise WeightSyncError(f"v{version} offered while v{self._filling[1]} is still filling")
        if self.holding(version) is not None:
            raise WeightSyncError(f"v{version} is here already")
        free = [v for v in self._candidates() if v is None or not self.readers(v, now)]
        if not free:
            raise WeightSyncError(f"v{version} has no place: {self.in_the_way(now)} are being read")
        # An empty slot if there is one, else the oldest version.
        slot = self._versions.index(min(free, key=lambda v: -1 if v is None else v))
        self._versions[slot], self._filling = None, (slot, version)
        return slot

    def commit(self) -> None:
        """Declare the filled slot complete. Raises WeightSyncError if no fill is open."""
        if self._filling is None:
            raise WeightSyncError("commit without begin_fill")
        slot, version = self._filling
        self._versions[slot], self._filling = version, None

    def abort(self) -> None:
        """Abandon the fill; its slot is empty."""
        self._filling = None

    def _candidates(self) -> list[int | None]:
        """Return what the slots hold that a fill may take: never the newest version."""
        newest = max(self.versions, default=None)
        return [version for version in self._versions if version is None or version != newest]
