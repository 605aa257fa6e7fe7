# SPDX-License-Identifier: Apache-2.0
"""Convert the event log to `trace.json`, in Chrome's trace event format, which ui.perfetto.dev opens.

A process is a pool of devices. Its threads are the holder of the lease and each lane of each stage of the
pool. Stages without devices share a process; so do the counters and marks of the whole run. A slice shows
that a lane ran, or what it waited for. An arrow follows a group from the draw of its prompt to its optimizer
step, through every slice that handled it.

The format is the "Trace Event Format" of the Chromium project, with the phases X, M, C, i and s, t, f. Times
are microseconds since the log was opened.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.events import LogRecord
from ...core.replay import Lane, RunState, lane_of
from ...errors import RunFilesError
from ..run_directory import read_events
from .trace_episodes import SlowestEpisode, TraceEvent, episode_events

SHORTEST_US = 0.01
"""Least duration of a slice of work, so that an arrow can start and end in it."""
MAX_FLOWS = 5000
"""Most groups to follow with arrows; above it, every second, third, ... group is followed."""
RUN_PID, HOST_PID = 1, 2
"""Processes of the trace that are no pool: the run as a whole, and stages without devices."""
LEASE_TID = 1
"""Thread of a pool's process that shows the holder of the lease."""
MARKS_TID = 1
"""Thread of the run's process that shows marks."""

_BATCH_ROLES = ("logp", "ref_logp", "values", "reward", "critic")
"""Stages that work on a whole batch, which is identified by its step."""
_MARKS = {
    "GATHERED": "version {version} gathered",
    "SERVED": "version {version} served",
    "RECALLED": "group recalled: {fate}",
    "FLAWED": "group generated again",
    "SAVED": "checkpoint of step {version}",
}


class _Track:
    """A thread of the trace: consecutive slices, and the arrows that pass through each."""

    def __init__(self, pid: int, tid: int) -> None:
        self.where = {"pid": pid, "tid": tid}
        self.events: list[TraceEvent] = []
        self.name: str | None = None
        self._cat = ""
        self._args: Mapping[str, Any] = {}
        self._since = self._end = 0.0
        self._lasted = 0.0
        """Duration of the current slice before it was interrupted for no time."""
        self._points: list[tuple[float, str]] = []

    def show(self, t_us: float, name: str | None, cat: str = "", **args: Any) -> list[tuple[float, str]]:
        """Start a slice `name`, or none. Returns the (time, group) of arrows through the slice that ended."""
        passed = self._close(t_us)
        self.name, self._cat, self._args = name, cat, args
        self._since = max(t_us, self._end)
        if self.events and self._continues(self.events[-1]):
            last = self.events.pop()
            self._since, self._lasted = last["ts"], last["dur"]
        return passed

    def _continues(self, last: TraceEvent) -> bool:
        """Return whether the new slice continues the last one after an interruption of no length."""
        same = last["name"] == self.name and last.get("args", {}) == self._args
        return same and self._cat == "run" and self._end == self._since

    def touch(self, t_us: float, group: str) -> None:
        """Let the arrow of a group pass through the current slice."""
        self._points.append((t_us, group))

    def _close(self, t_us: float) -> list[tuple[float, str]]:
        points, self._points = self._points, []
        if self.name is None:
            return []

        start, end = self._since, max(self._since + self._lasted, t_us)
        self._lasted = 0.0
        if end == start:
            if not points:
                return []
            end += SHORTEST_US
        self._end = end

        shown = {
            "ph": "X",
            "name": self.name,
            "cat": self._cat,
            "ts": round(start, 3),
            "dur": round(end - start, 3),
            **self.where,
        }
        self.events.append(shown | ({"args": dict(self._args)} if self._args else {}))
        # An arrow that touches a slice exactly at its edge may miss it.
        return [(min(max(at, start + SHORTEST_US / 2), end - SHORTEST_US / 2), group) for at, group in points]


class TraceBuilder:
    """A subscriber of the event log that builds the trace; `events` returns it."""

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._pids: dict[str, int] = {}
        self._state = RunState()

        self._tracks: dict[Lane, _Track] = {}
        self._leases: dict[str, _Track] = {}
        self._counts: Mapping[str, int] = self._state.group_counts
        self._passages: dict[str, list[tuple[float, dict[str, int]]]] = defaultdict(list)
        """Group to the times and slices that its arrow passes through."""
        self._trained: set[str] = set()
        self._episodes: list[SlowestEpisode] = []
        self._t_us = 0.0

    def __call__(self, record: LogRecord) -> None:
        self._t_us = round(record.t * 1e6, 3)
        trained = self._state.batches.get(int(record.fields["step"]), ()) if record.event == "TRAINED" else ()
        self._state(record)
        if record.role == "flow":
            if record.event == "START":
                self._begin(record.fields)
            return
        if record.state is not None:
            self._change_state(record)
        self._record_fact(record, trained)
        if self._counts != (counts := self._state.group_counts):
            self._counts = counts
            self._count("groups", counts)

    def events(self) -> list[TraceEvent]:
        """Return the whole trace in order of time; open slices end at the last record."""
        for track in [*self._tracks.values(), *self._leases.values()]:
            self._add_passages(track, track.show(self._t_us, None))

        slices = [
            event for track in [*self._tracks.values(), *self._leases.values()] for event in track.events
        ]
        # After the pools, which are numbered from HOST_PID on.
        shown = list(episode_events(self._episodes, HOST_PID + 1 + len(self._pids)))
        everything = [*self._events, *slices, *shown]
        timed = sorted((e for e in everything if e["ph"] != "M"), key=lambda e: float(e["ts"]))
        flows = sorted(self._flows(), key=lambda e: float(e["ts"]))
        return [*(e for e in everything if e["ph"] == "M"), *timed, *flows]

    # The shape of the run.

    def _begin(self, facts: Mapping[str, Any]) -> None:
        """Read stages and pools from START. Raises RunFilesError if an older version wrote the log."""
        if "graph" not in facts or "pools" not in facts:
            raise RunFilesError(
                "the event log does not name the stages and pools of the run; an older version wrote it"
            )

        self._name(RUN_PID, "run")
        self._name_thread(RUN_PID, MARKS_TID, "weight updates, checkpoints, recalls")
        self._name_thread(RUN_PID, MARKS_TID + 1, "validation")
        self._name(HOST_PID, "no device")

        for number, (name, pool) in enumerate(facts["pools"].items(), start=HOST_PID + 1):
            self._pids[name] = number
            self._name(number, f"pool {name}: {pool['devices']} device{'s' if pool['devices'] != 1 else ''}")
            self._name_thread(number, LEASE_TID, "lease")
            self._leases[name] = _Track(number, LEASE_TID)

    def _name(self, pid: int, name: str) -> None:
        for kind, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid})):
            self._events.append({"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": args})

    def _name_thread(self, pid: int, tid: int, name: str) -> None:
        for kind, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": tid})):
            self._events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    def _track(self, role: str, lane: int) -> _Track:
        if (role, lane) not in self._tracks:
            pid = self._pids.get(self._state.home.get(role, ""), HOST_PID)
            roles = list(self._state.downstream)
            place = roles.index(role) if role in roles else len(roles)
            tid = LEASE_TID + 1 + 1000 * place + lane
            self._name_thread(pid, tid, role if not lane else f"{role} [{lane}]")
            self._tracks[role, lane] = _Track(pid, tid)
        return self._tracks[role, lane]

    # Slices, from the state changes of the lanes.

    def _change_state(self, record: LogRecord) -> None:
        lane = lane_of(record)
        track = self._track(*lane)
        self._show_lease(record)
        if record.event == "OUTPUT" and "key" in record.fields:
            track.touch(self._t_us, str(record.fields["key"]))

        name, cat = self._label(record, lane)
        step = record.fields.get("step")
        if name != track.name:
            args = {} if step is None or cat != "run" else {"step": step}
            self._add_passages(track, track.show(self._t_us, name, cat, **args))

        if record.event == "LEASE" and record.role in _BATCH_ROLES and step is not None:
            for group in self._state.batches.get(int(step), ()):
                track.touch(self._t_us, group)

    def _label(self, record: LogRecord, lane: Lane) -> tuple[str | None, str]:
        """Return name and category of the slice of a lane's new state; the name is None for no slice."""
        awaited = self._state.awaited_by(lane)
        if record.state == "RUNNING":
            return record.role, "run"
        if record.state == "WAITING_INPUT":
            gate = self._state.gates.get(lane)
            shown = f"{gate.on} (version {gate.version})" if gate else " or ".join(awaited)
            return f"waits for {shown}" if shown else None, "wait"
        if record.state == "WAITING_RESOURCE":
            return f"waits for devices: {', '.join(sorted(awaited)) or 'their turn'}", "wait"
        if record.state == "WAITING_OUTPUT":
            return f"hands over to {', '.join(awaited)}" if awaited else "hands over its output", "wait"
        return None, ""

    def _show_lease(self, record: LogRecord) -> None:
        pool = self._state.home.get(record.role)
        if pool is None or record.event not in ("LEASE", "RELEASE"):
            return
        roles = [role for role, _ in self._state.leases[pool]]
        names = [f"{role} x {n}" if (n := roles.count(role)) > 1 else role for role in dict.fromkeys(roles)]
        self._leases[pool].show(self._t_us, ", ".join(names) or None, "lease")

    # Counters, marks and arrows, from the facts in the log.

    def _record_fact(self, record: LogRecord, trained: Sequence[str]) -> None:
        """Show a fact; `trained`: the groups of the step that the record ends."""
        event, fields, lane = record.event, record.fields, lane_of(record)

        if event in ("DRAWN", "ASSEMBLED"):
            self._touch(lane, fields["keys"])
        elif event == "ANSWERED" and (episode := SlowestEpisode.of(record)) is not None:
            self._episodes.append(episode)
        elif event == "TRAINED":
            self._touch(lane, trained)
            self._trained.update(trained)
            self._count("lag", {"mean": fields.get("lag/mean", 0.0), "max": fields.get("lag/max", 0.0)})

        if event in self._state.versions:
            self._count("version", {kind.lower(): version for kind, version in self._state.versions.items()})

        if event in _MARKS:
            shown = {
                "ph": "i",
                "name": _MARKS[event].format_map(fields),
                "cat": event.lower(),
                "s": "p",
                "ts": self._t_us,
            }
            self._events.append({**shown, "pid": RUN_PID, "tid": MARKS_TID, "args": dict(fields)})

        elif event == "VALIDATED":
            took_us = float(fields["seconds"]) * 1e6
            began = {
                "ph": "X",
                "name": f"validation of version {fields['version']}",
                "cat": "validated",
                "dur": took_us,
            }
            self._events.append({**began, "ts": self._t_us - took_us, "pid": RUN_PID, "tid": MARKS_TID + 1})

    def _count(self, name: str, values: Mapping[str, Any]) -> None:
        self._events.append({"ph": "C", "name": name, "ts": self._t_us, "pid": RUN_PID, "args": dict(values)})

    def _touch(self, lane: Lane, groups: Iterable[str]) -> None:
        track = self._track(*lane)
        for group in groups:
            track.touch(self._t_us, group)

    def _add_passages(self, track: _Track, points: Iterable[tuple[float, str]]) -> None:
        for at, group in points:
            self._passages[group].append((at, track.where))

    def _flows(self) -> Iterable[TraceEvent]:
        """Yield the events of one arrow per trained group, through its slices in order of time."""
        followed = [group for group in self._passages if group in self._trained]
        for number, group in enumerate(followed[:: 1 + len(followed) // MAX_FLOWS], start=1):
            passages = sorted(self._passages[group], key=lambda passage: passage[0])
            for place, (at, where) in enumerate(passages):
                phase = "s" if place == 0 else "f" if place == len(passages) - 1 else "t"
                yield {
                    "ph": phase,
                    "id": number,
                    "name": "group",
                    "cat": "group",
                    "bp": "e",
                    "ts": round(at, 3),
                    **where,
                    "args": {"group": group},
                }


def trace_events(records: Iterable[LogRecord]) -> list[TraceEvent]:
    """Return the trace of a whole log."""
    builder = TraceBuilder()
    for record in records:
        builder(record)
    return builder.events()


def write_trace(run_dir: Path) -> Path:
    """Write the `trace.json` of a run from its `events.jsonl`. Returns its path.

    Raises OSError if the log cannot be read, ValueError or RunFilesError if it is invalid.
    """
    events = trace_events(read_events(run_dir / "events.jsonl"))
    path = run_dir / "trace.json"
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        file.write("\n]}\n")
    os.replace(part, path)
    return path
