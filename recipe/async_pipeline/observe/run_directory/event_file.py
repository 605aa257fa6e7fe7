# SPDX-License-Identifier: Apache-2.0
"""Write the event log and the ledger to files, from a thread so that the event loop never does file I/O."""

from __future__ import annotations

import errno
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ...core.groups.bad_data import is_round
from ...core.waits.retry import Retry
from ...redaction import without_secrets

CLOSE_S = 30.0
"""Time limit for writing the queued records at the end of a run."""
SYNC_S = 120.0
"""Time limit for writing the queued records before a checkpoint."""
KEPT_BYTES = 64 << 20
"""Records that are kept for a disk that refuses them: days of a ledger."""
PIECE_BYTES = 1 << 20
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Seconds until records are tried again, at first and at most."""


class Record(Protocol):
    """A record of the event log or of the ledger."""

    def as_dict(self) -> dict[str, Any]:
        """Return the content of its line."""


class EventFile:
    """A subscriber that writes one JSON object per line, in order, and at once when the queue is empty.

    What the disk refuses is kept and tried again, after longer and longer pauses and at each `sync`: a full
    disk costs no record. Once KEPT_BYTES of records wait, or a record cannot become a line, nothing more is
    written, and each `sync` raises that failure.
    """

    def __init__(
        self,
        path: Path,
        *,
        append: bool = False,
        on_failure: Callable[[Exception], object] = lambda error: None,
        tell: Callable[[str], object] = lambda line: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file; `append` keeps its content and terminates a last line that was cut short.

        `on_failure` is called once nothing more is written, with the reason, in the thread that writes.
        `tell` gets a line for the user when the disk begins to refuse records.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._queue: queue.SimpleQueue[Record | threading.Event | None] = queue.SimpleQueue()
        self._path, self._now, self._on_failure, self._tell = path, now, on_failure, tell
        self._error: Exception | None = None
        """Why the records in `_waiting` are not in the file."""
        self._is_over = False
        self._retry = Retry(limit=sys.maxsize, first=RETRY_S, longest=LONGEST_RETRY_S)
        self._waiting = bytearray(b"\n" if append and _is_torn(path) else b"")
        self._unsynced = bytearray()
        """What the file has beyond the last byte that is known to be on disk."""
        mode = os.O_APPEND if append else os.O_TRUNC
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, 0o666)
        self._thread = threading.Thread(target=self._write, name=path.stem, daemon=True)
        self._thread.start()

    def __call__(self, record: Record) -> None:
        self._queue.put(record)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sync(self) -> None:
        """Block until every record so far is on disk. Raises OSError if writing fails or takes too long."""
        written = threading.Event()
        self._queue.put(written)
        if not written.wait(SYNC_S):
            raise OSError(errno.ETIMEDOUT, f"{self._path} was not on disk within {SYNC_S:g} s")
        if self._error is not None:
            why = getattr(self._error, "strerror", None) or str(self._error)
            number = getattr(self._error, "errno", None) or errno.EIO
            # A checkpoint waits for a disk that is full now, but not for records that are lost.
            raise OSError(errno.ENODATA if self._is_over else number, f"{self._path} is not complete: {why}")

    def close(self) -> None:
        """Write the queued records and close the file; give up on a disk after CLOSE_S. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _write(self) -> None:
        while (record := self._next()) is not None:
            try:
                self._take(record)
            except Exception as error:  # noqa: BLE001 - without this thread the queue would grow for ever
                self._give_up(error)
            if isinstance(record, threading.Event):
                record.set()
        self._flush()
        try:
            os.close(self._file)
        except OSError as error:
            self._error = self._error or error
        if self._error is not None and not self._is_over:
            self._give_up(self._error)

    def _next(self) -> Record | threading.Event | None:
        """Return the next record, after trying again to write the waiting ones."""
        while True:
            pause = max(0.0, self._retry.due - self._now()) if self._waiting else None
            try:
                return self._queue.get(timeout=pause)
            except queue.Empty:
                self._flush()

    def _take(self, record: Record | threading.Event) -> None:
        if self._is_over:
            return
        if isinstance(record, threading.Event):
            self._flush(sync=True)
            return
        line = without_secrets(json.dumps(record.as_dict(), default=str)) + "\n"
        self._waiting += line.encode()
        if len(self._waiting) > KEPT_BYTES and self._error is not None:
            self._flush()
            if self._error is not None:
                self._give_up(self._error)
        elif (self._queue.empty() or len(self._waiting) > PIECE_BYTES) and self._retry.is_due(self._now()):
            self._flush()

    def _flush(self, *, sync: bool = False) -> None:
        """Write what waits, if the disk takes it; with `sync` it is on disk then."""
        if self._is_over:
            return
        try:
            while self._waiting:
                written = os.write(self._file, self._waiting[:PIECE_BYTES])
                self._unsynced += self._waiting[:written]
                del self._waiting[:written]
            if sync:
                self._sync()
            elif len(self._unsynced) > KEPT_BYTES:
                self._unsynced.clear()
        except OSError as error:
            if not self._retry.in_a_row and is_round(self._retry.total + 1):
                self._tell(f"{self._path.name} waits for its disk; no record is lost so far: {error}")
            self._error = error
            self._retry.failed(self._now())
        else:
            self._error = None
            self._retry.succeeded()

    def _sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError:
            # The kernel has dropped these bytes, as network file systems do that are full.
            os.ftruncate(self._file, max(0, os.fstat(self._file).st_size - len(self._unsynced)))
            os.lseek(self._file, 0, os.SEEK_END)
            self._waiting[:0] = self._unsynced
            self._unsynced.clear()
            raise
        self._unsynced.clear()

    def _give_up(self, error: Exception) -> None:
        if not self._is_over:
            self._flush()
            self._is_over, self._error = True, error
            self._waiting.clear()
            self._on_failure(error)


def _is_torn(path: Path) -> bool:
    """Return whether the last line lacks its newline."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
