# SPDX-License-Identifier: Apache-2.0
"""Write the event log and the ledger to files, from a thread so that the event loop never does file I/O."""

from __future__ import annotations

import errno
import json
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ..core.events import LogRecord
from ..redaction import without_secrets

CLOSE_S = 30.0
"""Time limit for writing the queued records at the end of a run."""
SYNC_S = 120.0
"""Time limit for writing the queued records before a checkpoint."""


class Record(Protocol):
    """A record of the event log or of the ledger."""

    def as_dict(self) -> dict[str, Any]:
        """Return the content of its line."""


class EventFile:
    """A subscriber that writes one JSON object per line, in order, and flushes when the queue is empty.

    After the first failure nothing more is written; `sync` raises the failure.
    """

    def __init__(
        self,
        path: Path,
        *,
        append: bool = False,
        on_failure: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Open the file; `append` keeps its content and terminates a last line that was cut short.

        `on_failure` is called with the first failure, in the thread that writes.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._queue: queue.SimpleQueue[Record | threading.Event | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._on_failure = on_failure
        torn = append and _is_torn(path)
        self._file = path.open("a" if append else "w", encoding="utf-8")
        if torn:
            self._file.write("\n")
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
            raise OSError(errno.ETIMEDOUT, f"{self._file.name} was not on disk within {SYNC_S:g} s")
        if self._failure is not None:
            why = getattr(self._failure, "strerror", None) or str(self._failure)
            number = getattr(self._failure, "errno", None) or errno.EIO
            raise OSError(number, f"{self._file.name} is not complete: {why}")

    def close(self) -> None:
        """Write the queued records and close the file; give up on a disk after CLOSE_S. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._write_record(record)
            except Exception as error:  # noqa: BLE001 - without this thread the queue would grow for ever
                self._failed(error)
            if isinstance(record, threading.Event):
                record.set()
        try:
            self._file.close()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._on_failure(error)

    def _write_record(self, record: Record | threading.Event) -> None:
        if self._failure is not None:
            return
        if isinstance(record, threading.Event):
            self._file.flush()
            os.fsync(self._file.fileno())
            return
        self._file.write(without_secrets(json.dumps(record.as_dict(), default=str)) + "\n")
        if self._queue.empty():
            self._file.flush()


def _is_torn(path: Path) -> bool:
    """Return whether the last line lacks its newline."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_events(path: Path) -> list[LogRecord]:
    """Return the records of an `events.jsonl`, without a last line that a crash cut short.

    Raises OSError if the file cannot be read, ValueError or KeyError if another line is not a record.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) - 1:
                break
            raise
        records.append(LogRecord.of(fields))
    return records
