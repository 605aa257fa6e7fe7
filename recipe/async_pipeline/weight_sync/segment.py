# SPDX-License-Identifier: Apache-2.0
"""One file of shared memory, with mode 0600 and a random name.

Its owner backs it with memory before the first write and unlinks it. If the owner is killed, Python's
resource tracker unlinks it, or else `async-pipeline watch` or the next run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
from collections.abc import Sequence
from multiprocessing import resource_tracker

import torch

from ..errors import WeightSyncError
from .manifest import TensorEntry
from .memory_work import checksum
from .segment_names import SHM_DIR, check_name, new_name, open_own

logger = logging.getLogger(__name__)


class Segment:
    """One shared-memory file, mapped into this process."""

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        """Open or create the file. Raises WeightSyncError if the name is foreign, or it is missing or too
        short.
        """
        fd = _created(name) if create else open_own(name)
        try:
            if create:
                # Register it first: a process that is killed after this line leaves nothing behind.
                resource_tracker.register(f"/{name}", "shared_memory")
                os.ftruncate(fd, size)
            elif os.fstat(fd).st_size < size:
                raise WeightSyncError(f"shared memory {name} has fewer than the expected {size} bytes")
            self._map = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._reserved, self._pinned = fd, 0, 0
        self._refused = False
        self.name, self.size, self._owner = name, size, create
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Have the kernel back the first `nbytes` bytes with memory, once.

        Raises WeightSyncError if memory runs out. Without this call, the write would kill the process.
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
        """Let CUDA devices copy from and to the first `nbytes` bytes directly.

        If the driver refuses, e.g. because of a limit on locked memory, it copies twice instead; the process
        warns once and does not ask again for this segment.
        """
        if nbytes <= self._pinned or self._refused:
            return
        self._unpin()
        try:
            torch.cuda.check_error(
                int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), nbytes, 0))
            )
        except RuntimeError as error:
            self._refused = True
            _clear_cuda_error()
            warn_of_pageable_copies(str(error).splitlines()[0])
            return
        self._pinned = nbytes

    def checksum(self, nbytes: int) -> int:
        """Return the checksum of the first `nbytes` bytes."""
        return checksum(memoryview(self._map)[:nbytes])

    def close(self) -> None:
        """Unlink the file if this process made it. The mapping ends when the last tensor that uses it
        does.
        """
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


def _clear_cuda_error() -> None:
    """Consume the error that CUDA keeps for the next check, which would blame an unrelated kernel."""
    # Not verified on a GPU: PyTorch has no call for it, but checks, and thereby clears, after each launch.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


@functools.cache
def warn_of_pageable_copies(why: str) -> None:
    """Warn once in this process for each reason."""
    logger.warning(
        "CUDA refuses to pin shared memory (%s): weights are copied through pageable memory, which is "
        "slower; raise the limit on locked memory (ulimit -l), or free host memory",
        why,
    )


def _created(name: str) -> int:
    check_name(name)
    try:
        return os.open(SHM_DIR / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise WeightSyncError(f"shared memory {name}: {error.strerror}") from error


def view_of(segments: Sequence[Segment], entry: TensorEntry) -> torch.Tensor:
    """Return the tensor that `entry` describes, as an alias of its bucket."""
    raw = segments[entry.bucket].bytes[entry.offset : entry.offset + entry.nbytes]
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)


def create_segment(size: int) -> Segment:
    """Return a new segment of this process, unlinked at its end."""
    return Segment(new_name(), size, create=True)
