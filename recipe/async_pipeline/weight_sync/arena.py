# SPDX-License-Identifier: Apache-2.0
"""Host memory that a trainer writes and replicas on the same host map.

An arena is a list of shared-memory segments ("buckets"). They are created on demand, touched by the
first write and then reused for every later version: the first touch of fresh shared memory is ten
times slower than writing to it again. Segments are 0600, carry random names, and are unlinked by
their owner; if it is killed, by Python's resource tracker, `async-pipeline watch` or the next run.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from typing import ClassVar

import torch
import xxhash

from ..errors import WeightSyncError
from .delivery import draw_sample, sampled_names
from .dual_buffer import DualBuffer
from .manifest import BucketEntry, Manifest, TensorEntry
from .segment_names import PREFIX, SHM_DIR, new_name, sweep_orphans

ALIGN = 64
"""Each tensor starts on a cache line, which suits every dtype."""
HASH_BYTES = 16 << 20
"""A thread hashes what was gathered, this much at a time, while more is gathered."""


class Segment:
    """One shared-memory file, mapped into this process."""

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        """Raises WeightSyncError: not ours by name, missing, or shorter than `size`."""
        if not name.startswith(PREFIX) or "/" in name:
            raise WeightSyncError(f"{name!r} is not a segment of this pipeline")
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            fd = os.open(SHM_DIR / name, flags, 0o600)
        except OSError as error:
            raise WeightSyncError(f"shared memory {name}: {error.strerror}") from error
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
        self._fd, self._reserved = fd, 0
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
                f"{SHM_DIR} has {free_mb} MB left and the weights need more ({error.strerror}); enlarge it, e.g. "
                "docker run --shm-size"
            ) from error
        self._reserved = nbytes

    def checksum(self, nbytes: int) -> int:
        """xxh3 of the first `nbytes` bytes."""
        return xxhash.xxh3_64_intdigest(self.view(0, nbytes))

    def view(self, start: int, end: int) -> memoryview:
        """These bytes, uncopied."""
        return memoryview(self._map)[start:end]

    def close(self) -> None:
        """Unlink if this process made it. The mapping itself goes when no tensor uses it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._owner:
            self._owner = False
            (SHM_DIR / self.name).unlink(missing_ok=True)
            resource_tracker.unregister(f"/{self.name}", "shared_memory")


class RunningChecksum:
    """xxh3 of a segment, computed in a thread while the rest of it is still being written."""

    _thread: ClassVar = ThreadPoolExecutor(1, thread_name_prefix="xxh3")
    """One for all, so that pieces are hashed in order."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._hash = xxhash.xxh3_64()
        self._submitted = 0
        self._last: Future[None] | None = None

    def written(self, nbytes: int, on_device: bool, *, last: bool = False) -> None:
        """The first `nbytes` bytes will not change any more, once the copies from the device that began are done."""
        if nbytes - self._submitted >= HASH_BYTES or last:
            copied = torch.cuda.Event() if on_device else None
            if copied is not None:
                copied.record()
            self._last = self._thread.submit(self._update, self._submitted, nbytes, copied)
            self._submitted = nbytes

    def digest(self) -> int:
        """The checksum of all that was written. Raises what went wrong with a copy."""
        self.settle()
        return self._hash.intdigest()

    def settle(self) -> None:
        """Wait until nothing reads the segment any more."""
        if self._last is not None:
            self._last.result()

    def _update(self, start: int, end: int, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        self._hash.update(self._segment.view(start, end))


class Arena:
    """One slot of the dual buffer: as many buckets as the largest version needed so far."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._segments: list[Segment] = []
        self._used: list[int] = []
        self._tensors: list[TensorEntry] = []
        self._checksums: list[RunningChecksum] = []
        self._on_device = False

    def reset(self) -> None:
        """Forget the contents; keep the memory."""
        for checksum in self._checksums:
            checksum.settle()
        self._used, self._tensors, self._checksums, self._on_device = [], [], [], False

    def write(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> TensorEntry:
        """Copy one tensor in, cast to `dtype` if it is floating point and `dtype` is given."""
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * target.itemsize
        bucket, offset = self._place(nbytes)
        self._segments[bucket].reserve(offset + nbytes)
        view = self._segments[bucket].bytes[offset : offset + nbytes].view(target)
        view.copy_(tensor.detach().reshape(-1), non_blocking=tensor.is_cuda)
        self._on_device = self._on_device or tensor.is_cuda
        self._checksums[bucket].written(offset + nbytes, self._on_device)
        entry = TensorEntry(name, tuple(tensor.shape), str(target).removeprefix("torch."), bucket, offset, nbytes)
        self._tensors.append(entry)
        return entry

    def seal(self, version: int, proof_tensors: int, started: float) -> Manifest:
        """Finish the checksums, draw the samples for the proof and describe the whole, once all copies are done."""
        for checksum, used in zip(self._checksums, self._used, strict=True):
            checksum.written(used, self._on_device, last=True)
        if self._on_device:
            torch.cuda.synchronize()
        tensors = {e.name: e for e in self._tensors}
        return Manifest(
            version=version,
            tensors=tuple(self._tensors),
            buckets=tuple(
                BucketEntry(segment.name, used, checksum.digest())
                for segment, used, checksum in zip(self._segments, self._used, self._checksums, strict=False)
            ),
            samples=tuple(
                draw_sample(version, name, view_of(self._segments, tensors[name]))
                for name in sampled_names(tuple(tensors), version, proof_tensors)
            ),
            gather_s=time.perf_counter() - started,
        )

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    def _place(self, nbytes: int) -> tuple[int, int]:
        if self._used:
            offset = -(-self._used[-1] // ALIGN) * ALIGN
            if offset + nbytes <= self._segments[len(self._used) - 1].size:
                self._used[-1] = offset + nbytes
                return len(self._used) - 1, offset
        index = len(self._used)
        size = max(self._bucket_bytes, nbytes)
        if index < len(self._segments) and self._segments[index].size < nbytes:
            self._segments[index].close()
            self._segments[index] = create_segment(size)
        elif index == len(self._segments):
            self._segments.append(create_segment(size))
        if index > 0:
            self._checksums[-1].written(self._used[-1], self._on_device, last=True)
        self._used.append(nbytes)
        self._checksums.append(RunningChecksum(self._segments[index]))
        return index, 0


class ArenaWriter:
    """The trainer's side: gathers versions alternately into two arenas."""

    def __init__(self, bucket_bytes: int, proof_tensors: int, dtype: torch.dtype | None) -> None:
        sweep_orphans()
        self._arenas = (Arena(bucket_bytes), Arena(bucket_bytes))
        self._buffer = DualBuffer()
        self._proof_tensors = proof_tensors
        self._dtype = dtype

    def gather(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy all weights in; returns when the last copy is done. An error leaves the old version intact."""
        started = time.perf_counter()
        arena = self._arenas[self._buffer.begin_fill(version)]
        try:
            arena.reset()
            for name, tensor in weights:
                arena.write(name, tensor, self._dtype)
            manifest = arena.seal(version, self._proof_tensors, started)
        except BaseException:
            self._buffer.abort()
            raise
        self._buffer.commit()
        return manifest

    def close(self) -> None:
        """Unlink all segments; receivers keep what they have mapped."""
        for arena in self._arenas:
            arena.close()


class ArenaReader:
    """A receiver's side: maps segments once and hands out tensors that alias them."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}

    def verify(self, manifest: Manifest) -> None:
        """Raises WeightSyncError: a bucket does not have the checksum that the trainer computed."""
        for segment, bucket in zip(self._map(manifest), manifest.buckets, strict=True):
            if segment.checksum(bucket.nbytes) != bucket.xxh3:
                raise WeightSyncError(f"v{manifest.version}: bucket {bucket.segment} is corrupt (xxh3 differs)")

    def bucket(self, manifest: Manifest, sequence: int) -> torch.Tensor:
        """The bytes of one bucket, an alias of the arena."""
        return self._map(manifest)[sequence].bytes[: manifest.buckets[sequence].nbytes]

    def read(self, manifest: Manifest, piece_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Named tensors, aliases of the arena, in pieces of at most `piece_bytes`."""
        segments = self._map(manifest)
        for piece in manifest.pieces(piece_bytes):
            yield [(entry.name, view_of(segments, entry)) for entry in piece]

    def _map(self, manifest: Manifest) -> list[Segment]:
        names = {b.segment for b in manifest.buckets}
        for bucket in manifest.buckets:
            known = self._segments.get(bucket.segment)
            if known is None or known.size < bucket.nbytes:
                self._segments[bucket.segment] = Segment(bucket.segment, bucket.nbytes, create=False)
        # Two versions' worth of mappings stay; segments that were replaced by larger ones go.
        for name in list(self._segments):
            if name not in names and not (SHM_DIR / name).exists():
                self._segments.pop(name).close()
        return [self._segments[b.segment] for b in manifest.buckets]


def view_of(segments: list[Segment], entry: TensorEntry) -> torch.Tensor:
    """The tensor that `entry` describes, as an alias of its bucket."""
    raw = segments[entry.bucket].bytes[entry.offset : entry.offset + entry.nbytes]
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)


def create_segment(size: int) -> Segment:
    """A new segment of this process, unlinked when it ends."""
    return Segment(new_name(), size, create=True)

