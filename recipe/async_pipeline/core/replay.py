# SPDX-License-Identifier: Apache-2.0
"""Replay the event log: what every lane does and waits for, who holds the devices, and where the groups are.

Everything that reads more of the log than single facts uses `RunState`: the account of device-seconds, the
trace, the audit, the report. A state lasts from its record to the next one, so a reader that measures time
looks at the state before it passes the next record on.

    DRAWN ──► answering ──► finished ──► batched ──► (trained)
                  │             │
              RECALLED       REJECTED        both leave; a group that is generated again keeps its place
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .events import Interval, LogRecord
from .state_machine import TERMINAL

Lane = tuple[str, int]
"""A stage and the number of its lane."""

_TERMINAL = {state.name for state in TERMINAL}


class Gate(NamedTuple):
    """What a lane waits for before it works on its item."""

    on: str
    """The stage that makes the version."""
    version: int


class RunState:
    """A subscriber of the event log that holds the state of the run after the last record."""

    def __init__(self) -> None:
        self.t = 0.0
        """Seconds since the log was opened."""
        self.facts: Mapping[str, Any] = {}
        """The fields of START, among them `version`, `max_lag`, `graph` and `pools`; empty before it."""
        self.home: dict[str, str] = {}
        """Stage to pool."""
        self.downstream: Mapping[str, Sequence[str]] = {}
        self.upstream: dict[str, tuple[str, ...]] = {}

        self.lanes: dict[Lane, str] = {}
        """The name of each lane's state."""
        self.gates: dict[Lane, Gate] = {}
        self.leases: dict[str, dict[Lane, float]] = {}
        """Pool to the lanes that hold it, the longest holder first, each with the time of its lease."""

        self.versions = {"TRAINED": 0, "GATHERED": 0, "SERVED": 0}
        """The last version of each kind."""
        self.batches: dict[int, Sequence[str]] = {}
        """Step to the keys of its groups, until it is trained."""
        self._answering: set[str] = set()
        self._finished: set[str] = set()

    def __call__(self, record: LogRecord) -> None:
        self.t = record.t
        if record.role != "flow":
            self._change_lane(record)
            self._move_groups(record)
        elif record.event == "START":
            self._begin(record.fields)

    def is_running(self, role: str) -> bool:
        """Return whether any lane of a stage computes."""
        return any(state == "RUNNING" for (name, _), state in self.lanes.items() if name == role)

    def lanes_of(self, role: str) -> list[Lane]:
        """Return the lanes of a stage that have begun."""
        return [lane for lane in self.lanes if lane[0] == role]

    def holders(self, role: str) -> tuple[str, ...]:
        """Return the stages that hold the pool of a stage, each once, the longest holder first."""
        return tuple(dict.fromkeys(name for name, _ in self.leases.get(self.home.get(role, ""), {})))

    def awaited_by(self, lane: Lane) -> tuple[str, ...]:
        """Return the stages any one of which can end a lane's wait; none if it computes or has ended."""
        state, role = self.lanes.get(lane), lane[0]
        if lane in self.gates:
            return (self.gates[lane].on,)
        if state == "WAITING_RESOURCE":
            # A stage without devices passes through this state between two consecutive records.
            return self.holders(role)
        if state == "WAITING_OUTPUT":
            return tuple(self.downstream.get(role, ()))
        return self.upstream.get(role, ()) if state == "WAITING_INPUT" else ()

    @property
    def group_counts(self) -> Mapping[str, int]:
        """Number of groups by place, in the order in which a group passes through them."""
        return {
            "answering": len(self._answering),
            "finished": len(self._finished),
            "batched": sum(map(len, self.batches.values())),
        }

    def _begin(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.versions = dict.fromkeys(self.versions, int(facts.get("version", 0)))
        self.downstream = facts.get("graph", {})
        self.upstream = {
            role: tuple(a for a, consumers in self.downstream.items() if role in consumers)
            for role in self.downstream
        }
        # Prompts are admitted by weight updates.
        self.upstream["dataloader"] = ("param_update",)
        for name, pool in facts.get("pools", {}).items():
            self.leases[name] = {}
            self.home.update(dict.fromkeys(pool["roles"], name))

    def _change_lane(self, record: LogRecord) -> None:
        if record.state is None:
            return
        lane = lane_of(record)
        self.lanes[lane] = record.state

        if record.event == "GATED":
            self.gates[lane] = Gate(str(record.fields["on"]), int(record.fields["version"]))
        elif record.event == "ITEM" or record.state in _TERMINAL:
            self.gates.pop(lane, None)

        pool = self.home.get(record.role)
        if pool is not None and record.event == "LEASE":
            self.leases[pool][lane] = record.t
        elif pool is not None and record.event == "RELEASE":
            self.leases[pool].pop(lane, None)

    def _move_groups(self, record: LogRecord) -> None:
        event, fields = record.event, record.fields
        if event == "DRAWN":
            self._answering.update(fields["keys"])
        elif event == "OUTPUT" and record.role == "generate":
            if (key := str(fields.get("key"))) in self._answering:
                self._answering.remove(key)
                self._finished.add(key)
        elif event == "RECALLED" and fields.get("fate") == "drop":
            self._answering.discard(str(fields["key"]))
        elif event == "REJECTED":
            self._finished.discard(str(fields["key"]))
        elif event == "ASSEMBLED":
            self._finished.difference_update(fields["keys"])
            self.batches[int(fields["step"])] = fields["keys"]
        elif event == "TRAINED" and "step" in fields:
            self.batches.pop(int(fields["step"]), None)
        if event in self.versions and "version" in fields:
            self.versions[event] = int(fields["version"])


def lane_of(record: LogRecord) -> Lane:
    """Return the lane that wrote a record."""
    return record.role, int(record.fields.get("lane", 0))


def busy_intervals(records: Sequence[LogRecord], role: str) -> list[Interval]:
    """Return when any lane of `role` was RUNNING: disjoint, in order, touching ones merged, no empty
    ones.

    A lane that still runs at the end counts as running until the last record of any stage.
    """
    state = RunState()
    since: float | None = None
    intervals: list[Interval] = []
    for record in records:
        if record.role != role:
            continue
        state(record)
        running = state.is_running(role)
        if running and since is None:
            since = record.t
        elif since is not None and not running:
            _extend(intervals, since, record.t)
            since = None
    if since is not None:
        _extend(intervals, since, records[-1].t)
    return intervals


def _extend(intervals: list[Interval], start: float, end: float) -> None:
    """Append an interval in place, or extend the last one if they touch."""
    if intervals and intervals[-1][1] == start:
        start, _ = intervals.pop()
    if start < end:
        intervals.append((start, end))


def start_facts(records: Iterable[LogRecord]) -> Mapping[str, Any]:
    """Return the facts of START, or an empty mapping if the log has none."""
    starts = (record.fields for record in records if (record.role, record.event) == ("flow", "START"))
    return next(starts, {})
