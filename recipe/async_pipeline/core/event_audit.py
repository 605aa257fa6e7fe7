# SPDX-License-Identifier: Apache-2.0
"""Check the event log of one process of a run; these rules hold whatever failures were injected.

    time          never goes back
    stages        follow the table of `state_machine`, lane by lane
    pools         have no more tenants at once than slots
    versions      are trained one after another, gathered after training, served after gathering
    lag           of trained data stays within the bound

`ledger_audit` checks that every prompt has one fate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import StageProtocolError
from .state_machine import TERMINAL, Event, StageState, advance

MOVES = frozenset(event.name for event in Event)
RELEASING = frozenset({"RELEASE", "FINISH", *(state.name for state in TERMINAL)})


class EventAudit:
    """Takes the records of a log in their order; `violations` holds the violations found so far."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.served: list[tuple[float, int]] = []
        """Pairs of seconds since the log opened and the version that all replicas served then."""
        self._t = 0.0
        self._max_lag = 0
        self._pool_of: dict[str, str] = {}
        self._slots: dict[str, int] = {}
        self._states: dict[tuple[str, int], StageState] = {}
        self._tenants: dict[str, set[tuple[str, int]]] = {}
        self._trained = self._first = 0
        self._gathered: set[int] = set()

    def take(self, record: Mapping[str, Any]) -> None:
        """Check one line of `events.jsonl`. A line that is not a record is a violation."""
        try:
            self._take(record, str(record["role"]), str(record["event"]), float(record["t"]))
        except (KeyError, TypeError, ValueError) as error:
            self._say(f"not a record of an event log ({type(error).__name__}: {error}): {str(record)[:100]}")

    def _take(self, record: Mapping[str, Any], role: str, event: str, t: float) -> None:
        if t < self._t:
            self._say(f"time goes back from {self._t:.6f} to {t:.6f} s at {role} {event}")
        self._t = t
        if role == "flow":
            if event == "START":
                self._begin(record)
            return
        lane = (role, int(record.get("lane", 0)))
        if event in MOVES:
            self._move(lane, Event[event], str(record["state"]))
        pool = self._pool_of.get(role)
        if pool is not None:
            self._lease(pool, lane, event, str(record.get("state")))
        check = {"TRAINED": self._train, "GATHERED": self._gather, "SERVED": self._serve}.get(event)
        if check is not None:
            check(int(record["version"]), record)

    def _begin(self, record: Mapping[str, Any]) -> None:
        self._max_lag, self._first = int(record["max_lag"]), int(record["version"])
        self._trained = self._first
        for name, pool in record["pools"].items():
            self._slots[name], self._tenants[name] = int(pool["slots"]), set()
            self._pool_of.update(dict.fromkeys(pool["roles"], name))

    def _move(self, lane: tuple[str, int], event: Event, said: str) -> None:
        before = self._states.get(lane, StageState.IDLE)
        if event is Event.LEASE and before is StageState.WAITING_OUTPUT and said == before.name:
            return  # taken again, see `compute_again`
        try:
            after = advance(before, event)
        except StageProtocolError as error:
            self._say(f"{lane[0]}[{lane[1]}] at {self._t:.6f} s: {error}")
            after = StageState[said]
        if after.name != said:
            self._say(
                f"{lane[0]}[{lane[1]}] at {self._t:.6f} s: {event.name} leads from {before.name} to "
                f"{after.name}, not {said}"
            )
        self._states[lane] = after

    def _lease(self, pool: str, lane: tuple[str, int], event: str, state: str) -> None:
        tenants = self._tenants[pool]
        if event == "LEASE":
            tenants.add(lane)
            if len(tenants) > self._slots[pool]:
                held = ", ".join(f"{role}[{number}]" for role, number in sorted(tenants))
                self._say(
                    f"pool {pool} at {self._t:.6f} s: {len(tenants)} leases on {self._slots[pool]} slots: "
                    f"{held}"
                )
        elif event in RELEASING or state in RELEASING:
            tenants.discard(lane)

    def _train(self, version: int, record: Mapping[str, Any]) -> None:
        if version != self._trained + 1:
            self._say(f"step {version} is trained after step {self._trained}")
        self._trained = version
        if (lag := float(record.get("lag/max", 0))) > self._max_lag:
            self._say(f"step {version} trains on responses with lag {lag:g}; {self._max_lag} is allowed")

    def _gather(self, version: int, record: Mapping[str, Any]) -> None:
        if version > self._trained:
            self._say(f"version {version} is gathered, and step {self._trained} is the last that was trained")
        self._gathered.add(version)

    def _serve(self, version: int, record: Mapping[str, Any]) -> None:
        if version not in self._gathered:
            self._say(f"version {version} is served, and was never gathered")
        if self.served and version <= self.served[-1][1]:
            self._say(f"version {version} is served after version {self.served[-1][1]}")
        if int(record["replicas"]) < 1:
            self._say(f"version {version} is served by no replica")
        self.served.append((self._t, version))

    def _say(self, text: str) -> None:
        self.violations.append(text)


def audit_events(records: Iterable[Mapping[str, Any]]) -> EventAudit:
    """Audit a complete log."""
    audit = EventAudit()
    for record in records:
        audit.take(record)
    return audit
