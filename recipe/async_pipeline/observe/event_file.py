# SPDX-License-Identifier: Apache-2.0
"""Writes the event log to `events.jsonl` from a thread, so that the event loop never touches a file."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from types import TracebackType

from ..core.events import LogRecord

CLOSE_S = 30.0
"""What a disk gets at the end to take what is queued."""


class EventFile:
    """A subscriber of the event log: one JSON object a line, in order; flushed when the queue is empty."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._queue: queue.SimpleQueue[LogRecord | None] = queue.SimpleQueue()
        self._file = path.open("w", encoding="utf-8")
        self._thread = threading.Thread(target=self._write, name="event-file", daemon=True)
        self._thread.start()

    def __call__(self, record: LogRecord) -> None:
        self._queue.put(record)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what is queued, then close the file; a disk that hangs is not waited for. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _write(self) -> None:
        with self._file:
            while (record := self._queue.get()) is not None:
                self._file.write(json.dumps(record.as_dict(), default=str) + "\n")
                if self._queue.empty():
                    self._file.flush()
