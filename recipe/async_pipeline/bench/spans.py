# SPDX-License-Identifier: Apache-2.0
"""Named intervals that the processes of a job append to files of one directory; standard library only.

Seconds of the machine's monotonic clock, which all processes of one host share.
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
"""Environment variable: where the processes of a job write their spans."""
REFERENCE = "ASYNC_PIPELINE_BENCH_REFERENCE"
"""Environment of a job: seed and lognormal of the waits of its reference policy, as JSON; or nothing."""
POLL_S = "ASYNC_PIPELINE_BENCH_POLL_S"
"""Environment variable: how often verl's own trainers look for finished answers."""


class Span(NamedTuple):
    """`name` went on from `start` to `end`."""

    name: str
    start: float
    end: float
    facts: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.start


class SpanFile:
    """Appends to a file of this process. Each span is one short write, so a killed job keeps what it
    wrote.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"spans-{os.getpid()}.jsonl"
        self._file: int | None = None

    def add(self, name: str, start: float, end: float | None = None, **facts: Any) -> None:
        ended = time.monotonic() if end is None else end
        if self._file is None:  # open until the process ends: opening takes longer than what is timed
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(self._file, f"{json.dumps([name, start, ended, facts])}\n".encode())

    @contextmanager
    def measure(self, name: str, **facts: Any) -> Iterator[None]:
        """Time the body, also when it raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start, **facts)


@cache
def of_this_job() -> SpanFile:
    """The file of this process. Raises KeyError: it does not belong to a benchmark."""
    return SpanFile(Path(os.environ[SPANS_DIR]))


def read_spans(directory: Path) -> list[Span]:
    """All spans of a job, by their end. A line that a killed process left half written is skipped."""
    spans = []
    for path in directory.glob("spans-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                spans.append(Span(*json.loads(line)))
            except ValueError:
                continue
    return sorted(spans, key=lambda span: span.end)


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals, in order, that cover what any of the given ones covers."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged
