# SPDX-License-Identifier: Apache-2.0
"""Named intervals that the processes of a job append to files in one directory. Standard library only.

Times are seconds of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SPANS_DIR = "ASYNC_PIPELINE_BENCH_DIR"
"""Environment variable: directory in which the processes of a job write their spans."""
REFERENCE = "ASYNC_PIPELINE_BENCH_REFERENCE"
"""Environment variable: seed and latency of the reference policy as JSON, or an empty string."""
POLL_S = "ASYNC_PIPELINE_BENCH_POLL_S"
"""Environment variable: interval at which verl's trainers poll for finished responses."""


class MeasuredSpan(NamedTuple):
    """An interval from `start` to `end`, in seconds."""

    name: str
    start: float
    end: float
    facts: dict[str, Any]

    @property
    def seconds(self) -> float:
        """Duration of the span."""
        return self.end - self.start


class SpanFile:
    """A file of this process. Each span is one short write, so a killed job keeps its spans."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"spans-{os.getpid()}.jsonl"
        self._file: int | None = None

    def add(self, name: str, start: float, end: float | None = None, **facts: Any) -> None:
        """Append a span; `end` defaults to the current time."""
        ended = time.monotonic() if end is None else end
        if self._file is None:  # stays open: opening takes longer than the timed work
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(self._file, f"{json.dumps([name, start, ended, facts])}\n".encode())

    @contextmanager
    def measure(self, name: str, **facts: Any) -> Iterator[None]:
        """Record a span of the body, also if the body raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start, **facts)


@cache
def of_this_job() -> SpanFile:
    """Return the file of this process. Raises KeyError if the process is not part of a benchmark."""
    return SpanFile(Path(os.environ[SPANS_DIR]))


def read_spans(directory: Path) -> list[MeasuredSpan]:
    """Return all spans of a job in order of their end; incomplete lines of killed processes are skipped."""
    spans = []
    for path in directory.glob("spans-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                spans.append(MeasuredSpan(*json.loads(line)))
            except ValueError:
                continue
    return sorted(spans, key=lambda span: span.end)


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint intervals in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged
