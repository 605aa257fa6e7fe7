# SPDX-License-Identifier: Apache-2.0
"""Copies and checksums of host memory, by several threads.

One thread copies or hashes less than half of what the memory of a host can do, and while engines and trainer
use all cores, it also gets only its share of them. Both operations release the interpreter lock. Threads of
PyTorch are of no use here: a process of an engine on a CPU often has one, to leave the cores to the others.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
import xxhash

T = TypeVar("T")
R = TypeVar("R")
THREADS = 8
"""Threads of a copy or a checksum, also on two cores: updates are short, and the others keep busy."""
BACKGROUND_NICE = 4
"""How much nicer than its process a thread is that copies in the background: against one thread that
generates, it gets less than a third of a core.
"""
PIECE_BYTES = 8 << 20
"""Memory that a thread copies at a time."""
HASHED_BYTES = 16 << 20
"""Memory that is hashed at a time; part of the definition of `checksum`."""


def checksum(data: Any) -> int:
    """Return the checksum of a buffer of bytes.

    It is xxh3 up to `HASHED_BYTES`; above, xxh3 of the concatenated xxh3 of each piece of that size.
    """
    view = memoryview(data).cast("B")
    if view.nbytes <= HASHED_BYTES:
        return xxhash.xxh3_64_intdigest(view)
    pieces = [view[at : at + HASHED_BYTES] for at in range(0, view.nbytes, HASHED_BYTES)]
    digests = _in_threads(xxhash.xxh3_64_digest, pieces)
    return xxhash.xxh3_64_intdigest(b"".join(digests))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the target at its place, as `Tensor.copy_` does; all are in host memory.

    The order is free, so targets must not overlap each other or a source.
    """
    if torch.get_num_threads() > 1:
        # Each copy by PyTorch uses its threads.
        _copy_by_torch(targets, sources)
    else:
        _in_threads(_copy, _batches(targets, sources))


def copy_in_background(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy like `copy_all`, in this thread alone, which gives way to others from here on.

    For copies that nothing waits for, next to threads that generate.
    """
    process, thread = os.getpid(), threading.get_native_id()
    if thread != process:  # the main thread must not give way for good
        with suppress(OSError):  # only on Linux does each thread have a priority
            nice = os.getpriority(os.PRIO_PROCESS, process)
            os.setpriority(os.PRIO_PROCESS, thread, min(19, nice + BACKGROUND_NICE))
    _copy((list(targets), list(sources)))


def apart(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no two tensors can overlap, as far as their first and last elements tell."""
    places = sorted((t.data_ptr(), t.data_ptr() + t.element_size() * extent(t)) for t in tensors if t.numel())
    return all(end <= start for (_, end), (start, _) in pairwise(places))


def extent(tensor: torch.Tensor) -> int:
    """Return the elements from the first one of a tensor to its last one, inclusive."""
    extent: int = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return extent


CopyBatch = tuple[list[torch.Tensor], list[torch.Tensor]]


def _copy(batch: CopyBatch) -> None:
    rest: CopyBatch = [], []
    for target, source in zip(*batch, strict=True):
        if _same_bytes(target, source):
            # The C library can write large blocks past the caches (`GLIBC_TUNABLES` in
            # run_scripts/cpu_env.sh), so that it need not read them first.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            rest[0].append(target)
            rest[1].append(source)
    _copy_by_torch(*rest)


def _same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a copy changes neither the order nor the type of elements."""
    same = target.dtype == source.dtype and target.shape == source.shape
    plain = same and target.is_contiguous() and source.is_contiguous()
    return plain and not (target.is_conj() or source.is_conj() or target.is_neg() or source.is_neg())


def _copy_by_torch(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def _batches(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[CopyBatch]:
    """Split copies into batches of about `PIECE_BYTES`; large tensors along their first axis."""
    batches: list[CopyBatch] = [([], [])]
    room = PIECE_BYTES
    for whole, values in zip(targets, sources, strict=True):
        pairs = [(whole, values)]
        if whole.nbytes >= 2 * PIECE_BYTES and whole.dim() and whole.shape == values.shape:
            pieces = min(whole.shape[0], whole.nbytes // PIECE_BYTES)
            pairs = list(zip(whole.tensor_split(pieces), values.tensor_split(pieces), strict=True))
        for target, source in pairs:
            if room <= 0:
                batches.append(([], []))
                room = PIECE_BYTES
            batches[-1][0].append(target)
            batches[-1][1].append(source)
            room -= target.nbytes
    return batches


def _in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the results of `work` for all items. Raises the first error, after all work has ended."""
    if len(items) < 2:
        return [work(item) for item in items]
    futures = [threads_of(os.getpid()).submit(work, item) for item in items]
    wait(futures)
    return [future.result() for future in futures]


@cache
def threads_of(pid: int) -> Executor:
    """Return the threads of this process: a child has none of the threads of its parent."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="memory")
