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
import threading
from collections.abc import Iterable, Sequence
from multiprocessing import resource_tracker

import torch

from ...errors import WeightSyncError
from .manifest import TensorEntry
from .memory_work import checksum, extent
from .segment_names import SHM_DIR, check_name, new_name, open_own

logger = logging.getLogger(__name__)

Range = tuple[int, int]
"""First byte, and the byte after the last one."""


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
            # A version of a large model has hundreds of segments: unlike `mmap`, PyTorch keeps no descriptor.
            storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, size)
        finally:
            os.close(fd)
        self._reserved, self._pinning = 0, threading.Lock()
        self._wanted: list[Range] = []
        self._pinned: list[Range] = []
        self._refused = False
        self.name, self.size, self._owner = name, size, create
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage)

    def reserve(self, nbytes: int) -> None:
        """Have the kernel back the first `nbytes` bytes with memory, once.

        Raises WeightSyncError if memory runs out. Without this call, the write would kill the process.
        """
        if nbytes <= self._reserved:
            return
        fd = open_own(self.name)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            free_mb = os.statvfs(SHM_DIR).f_bavail * os.statvfs(SHM_DIR).f_frsize >> 20
            raise WeightSyncError(
                f"{SHM_DIR} has {free_mb} MB left and the weights need more ({error.strerror}); enlarge "
                "it, e.g. "
                "docker run --shm-size"
            ) from error
        finally:
            os.close(fd)
        self._reserved = nbytes

    def pin(self, ranges: Iterable[Range]) -> None:
        """Let CUDA devices copy from and to these ranges of bytes directly, and no others.

        Each copy must be inside one range or share no page with any: CUDA refuses others. If the driver
        refuses to pin, e.g. because of a limit on locked memory, it copies twice instead; the process warns
        once and does not ask again for this segment.
        """
        wanted = _in_pages(ranges, self.size)
        with self._pinning:
            if wanted == self._wanted:
                return
            self._unpin()
            self._wanted = wanted
            while not self._refused and len(self._pinned) < len(wanted):
                begin, end = wanted[len(self._pinned)]
                try:
                    code = torch.cuda.cudart().cudaHostRegister(self.address + begin, end - begin, 0)
                    torch.cuda.check_error(int(code))
                except RuntimeError as error:
                    self._refused = True
                    _clear_cuda_error()
                    warn_of_pageable_copies(str(error).splitlines()[0])
                else:
                    self._pinned.append((begin, end))

    @property
    def address(self) -> int:
        """Where this process has mapped it."""
        address: int = self.bytes.data_ptr()
        return address

    def checksum(self, nbytes: int) -> int:
        """Return the checksum of the first `nbytes` bytes."""
        return checksum(self.bytes[:nbytes].numpy())

    def close(self) -> None:
        """Unlink the file if this process made it. The mapping ends with the last tensor that uses it."""
        self._refused = True  # a thread may be about to pin
        self.pin(())
        if self._owner:
            self._owner = False
            (SHM_DIR / self.name).unlink(missing_ok=True)
            resource_tracker.unregister(f"/{self.name}", "shared_memory")

    def _unpin(self) -> None:
        while self._pinned:
            begin, _ = self._pinned.pop()
            address = self.address + begin
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


def _in_pages(ranges: Iterable[Range], size: int) -> list[Range]:
    """Return the pages of ranges, as sorted ranges that do not touch."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        begin, end = (
            first // mmap.PAGESIZE * mmap.PAGESIZE,
            min(size, -(-last // mmap.PAGESIZE) * mmap.PAGESIZE),
        )
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return found


def direct_ranges(tensors: Iterable[torch.Tensor]) -> dict[int, list[Range]]:
    """Return the ranges of tensors that a device copies directly, by the address of their memory.

    PyTorch copies a tensor with gaps through a buffer, which need not be pinned here.
    """
    found: dict[int, list[Range]] = {}
    for tensor in tensors:
        if tensor.numel() and extent(tensor) == tensor.numel():
            address = tensor.untyped_storage().data_ptr()
            begin = tensor.data_ptr() - address
            found.setdefault(address, []).append((begin, begin + tensor.nbytes))
    return found


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
