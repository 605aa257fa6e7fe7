# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint that are hashed while they are written, or in pieces where others wrote them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

PIECE_BYTES = 16 << 20
"""Bytes that are read or hashed at a time."""
CountBytes = Callable[[int], object]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint, with forward slashes."""
    nbytes: int
    xxh3: str


class HashedFile:
    """A file open for writing, which hashes what it writes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._digest = descriptor, xxhash.xxh3_64()
        self.nbytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data`; return its length in bytes. Raises OSError if the disk refuses it."""
        left = memoryview(data).cast("B")
        length = len(left)
        while left:
            piece = left[: os.write(self._descriptor, left[:PIECE_BYTES])]
            self._digest.update(piece)
            left = left[len(piece) :]
        self.nbytes += length
        return length

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class WrittenFiles:
    """The files of a folder that were hashed while they were written, by several threads or processes."""

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, threading.Lock()
        self._entries: dict[str, FileEntry] = {}

    @property
    def entries(self) -> dict[str, FileEntry]:
        """Complete files, by path."""
        with self._lock:
            return dict(self._entries)

    def add(self, entries: Iterable[FileEntry]) -> None:
        """Add files that other processes have written, and hashed meanwhile."""
        with self._lock:
            self._entries |= {entry.path: entry for entry in entries}

    @contextmanager
    def create(self, path: Path) -> Iterator[HashedFile]:
        """Write a new file below the root; it is on disk after the block."""
        name = path.relative_to(self._root).as_posix()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            file = HashedFile(descriptor)
            yield file
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with self._lock:
            self._entries[name] = FileEntry(path=name, nbytes=file.nbytes, xxh3=file.hexdigest())


def entry_of(root: Path, path: Path, *, sync: bool = False, count: CountBytes | None = None) -> FileEntry:
    """Hash a file below `root`. With `sync`, flush it to disk; `count` receives the bytes of each piece."""
    digest, nbytes = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while piece := os.read(file.fileno(), PIECE_BYTES):
            digest.update(piece)
            nbytes += len(piece)
            if count is not None:
                count(len(piece))
        if sync:
            # fsync flushes the file itself, also data written through other handles.
            os.fsync(file.fileno())
    return FileEntry(path=path.relative_to(root).as_posix(), nbytes=nbytes, xxh3=digest.hexdigest())
