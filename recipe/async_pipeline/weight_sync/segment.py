# SPDX-License-Identifier: Apache-2.0
"""One file of shared memory: 0600, a random name, backed with memory before it is written, unlinked by its
owner.

If the owner is killed, Python's resource tracker unlinks it, or else `async-pipeline watch` or the next run.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing import resource_tracker

import torch
import xxhash

from ..errors import WeightSyncError
from .segment_names import SHM_DIR, check_name, new_name, open_own


class Segment:
    """One shared-memory file, mapped into this process."""

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        """Raises WeightSyncError: not ours by name, missing, or shorter than `size`."""
        fd = _created(name) if create else open_own(name)
        try:
            if create:
                # Owner first: from here on a killed process leaves nothing behind.
                resource_tracker.register(f"/{name}", "shared_memory")
                os.ftruncate(fd, size)
            elif os.fstat(fd).st_size < size:
                raise WeightSyncError(f"shared memory {name} holds fewer than the {size} bytes promised")
            self._map = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._reserved, self._pinned = fd, 0, 0
        self.name, self.size, self._owner = name, size, create
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Have the kernel back the first `nbytes` bytes with memory, once.

        Raises WeightSyncError: there is not enough. Without this, writing would kill the process.
        """
        if nbytes <= self._reserved:
            return
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            free_mb = os.statvfs(SHM_DIR).f_bavail * os.statvfs(SHM_DIR).f_frsize >> 20
            raise WeightSyncError(
                f"{SHM_DIR} has {free_mb} MB left and the weights need more ({error.strerror}); enlarge "
                "it, e.g. "
                "docker run --shm-size"
            ) from error
        self._reserved = nbytes

    def pin(self, nbytes: int) -> None:
        """Let CUDA devices copy from and to the first `nbytes` bytes directly. Without, its driver copies
        twice.

        Raises RuntimeError: the driver refuses.
        """
        if nbytes <= self._pinned:
            return
        self._unpin()
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(self.bytes.data_ptr(), nbytes, 0)))
        self._pinned = nbytes

    def checksum(self, nbytes: int) -> int:
        """xxh3 of the first `nbytes` bytes."""
        return xxhash.xxh3_64_intdigest(memoryview(self._map)[:nbytes])

    def close(self) -> None:
        """Unlink if this process made it. The mapping itself goes when no tensor uses it any more."""
        self._unpin()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._owner:
            self._owner = False
            (SHM_DIR / self.name).unlink(missing_ok=True)
            resource_tracker.unregister(f"/{self.name}", "shared_memory")

    def _unpin(self) -> None:
        if self._pinned:
            self._pinned = 0
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())))


def _created(name: str) -> int:
    check_name(name)
    try:
        return os.open(SHM_DIR / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise WeightSyncError(f"shared memory {name}: {error.strerror}") from error


def create_segment(size: int) -> Segment:
    """A new segment of this process, unlinked when it ends."""
    return Segment(new_name(), size, create=True)
