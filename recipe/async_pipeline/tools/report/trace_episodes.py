# SPDX-License-Identifier: Apache-2.0
"""Show episodes in the trace: of each group the one that ended last, turn by turn.

The event ANSWERED of a group with several turns has their times (`SLOWEST_TURNS`). Episodes that overlap are
on different threads of one process of the trace; an episode encloses its turns, and what is between two turns
is its environment, or tools.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...core.events import SLOWEST_TURNS, LogRecord

MAX_TRACKS = 64
"""Episodes that are shown at the same time; further ones are left out."""
TraceEvent = dict[str, Any]


class SlowestEpisode(NamedTuple):
    """The slowest episode of a group, in seconds since the log was opened."""

    group: str
    start: float
    end: float
    turns: Sequence[tuple[float, float]]
    """Start and end of each turn."""

    @classmethod
    def of(cls, record: LogRecord) -> SlowestEpisode | None:
        """Return the episode of an ANSWERED record, or None if it has no turns."""
        turns = record.fields.get(SLOWEST_TURNS) or ()
        if not turns:
            return None
        start = record.t - float(record.fields["seconds"])
        spans = [(start + float(at), start + float(at) + float(took)) for at, took in turns]
        return cls(str(record.fields["key"]), start, max(record.t, spans[-1][1]), spans)


def episode_events(records: Sequence[SlowestEpisode], pid: int) -> Iterator[TraceEvent]:
    """Yield the names and slices of the process `pid`, which shows these episodes."""
    if not records:
        return
    for kind, args in (
        ("process_name", {"name": "slowest episode of each group"}),
        ("process_sort_index", {}),
    ):
        yield {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": args or {"sort_index": pid}}

    # The free threads, and for each occupied one the end of its episode.
    free, busy = list(range(1, MAX_TRACKS + 1)), list[tuple[float, int]]()
    for episode in sorted(records, key=lambda one: one.start):
        while busy and busy[0][0] <= episode.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            track = heapq.heappop(free)
            heapq.heappush(busy, (episode.end, track))
            yield from _slices(episode, {"pid": pid, "tid": track})


def _slices(episode: SlowestEpisode, where: TraceEvent) -> Iterator[TraceEvent]:
    args = {"group": episode.group, "turns": len(episode.turns)}
    yield _slice(episode.start, episode.end, f"episode of {episode.group}", "episode", where) | {"args": args}
    at = episode.start
    for number, (start, end) in enumerate(episode.turns, start=1):
        if start > at:
            yield _slice(at, start, "environment", "environment", where)
        yield _slice(start, end, f"turn {number}", "turn", where)
        at = end
    if episode.end > at:
        yield _slice(at, episode.end, "environment, score", "environment", where)


def _slice(start: float, end: float, name: str, cat: str, where: TraceEvent) -> TraceEvent:
    ts = round(start * 1e6, 3)
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": round(end * 1e6 - ts, 3), **where}
