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

from ..core.events import LogRecord
from ..core.replay import RunState, lane_of
from ..core.state_machine import TRANSITIONS, Event, StageState, next_state
from ..errors import StageProtocolError

MOVES = frozenset(event.name for event in Event)


class EventAudit:
    """Takes the records of a log in their order; `violations` holds the violations found so far."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.served: list[tuple[float, int]] = []
        """Pairs of seconds since the log opened and the version that all replicas served then."""
        self.state = RunState()
        """The state after the last record."""
        self._gathered: set[int] = set()

    def take(self, flat: Mapping[str, Any]) -> None:
        """Check one line of `events.jsonl`. A line that is not a record is a violation."""
        try:
            self._take(LogRecord.of(flat))
        except (KeyError, TypeError, ValueError) as error:
            self._say(f"not a record of an event log ({type(error).__name__}: {error}): {str(flat)[:100]}")

    def _take(self, record: LogRecord) -> None:
        before_t, trained = self.state.t, self.state.versions["TRAINED"]
        if record.t < before_t:
            self._say(
                f"time goes back from {before_t:.6f} to {record.t:.6f} s at {record.role} {record.event}"
            )
        if record.role != "flow" and record.event in MOVES:
            self._check_move(record)
        self.state(record)
        if record.role == "flow":
            return
        if record.event == "LEASE":
            self._check_leases(self.state.home.get(record.role, ""))
        if record.event == "TRAINED":
            self._check_training(int(record.fields["version"]), trained, record.fields)
        elif record.event == "GATHERED":
            self._check_gather(int(record.fields["version"]))
        elif record.event == "SERVED":
            self._check_service(int(record.fields["version"]), int(record.fields["replicas"]))

    def _check_move(self, record: LogRecord) -> None:
        """Compare the state in a record with the table; the record has the last word about what follows."""
        role, number = lane = lane_of(record)
        before, event = StageState[self.state.lanes.get(lane, "IDLE")], Event[record.event]
        if event is Event.LEASE and before is StageState.WAITING_OUTPUT and record.state == before.name:
            return  # taken again, see `compute_again`
        try:
            after = next_state(TRANSITIONS, before, event)
        except StageProtocolError as error:
            self._say(f"{role}[{number}] at {record.t:.6f} s: {error}")
            return
        if after.name != record.state:
            self._say(
                f"{role}[{number}] at {record.t:.6f} s: {event.name} leads from {before.name} to "
                f"{after.name}, not {record.state}"
            )

    def _check_leases(self, pool: str) -> None:
        tenants = self.state.leases.get(pool, {})
        if tenants and len(tenants) > (slots := int(self.state.facts["pools"][pool]["slots"])):
            held = ", ".join(f"{role}[{number}]" for role, number in sorted(tenants))
            self._say(f"pool {pool} at {self.state.t:.6f} s: {len(tenants)} leases on {slots} slots: {held}")

    def _check_training(self, version: int, trained: int, facts: Mapping[str, Any]) -> None:
        if version != trained + 1:
            self._say(f"step {version} is trained after step {trained}")
        allowed = int(self.state.facts.get("max_lag", 0))
        if (lag := float(facts.get("lag/max", 0))) > allowed:
            self._say(f"step {version} trains on responses with lag {lag:g}; {allowed} is allowed")

    def _check_gather(self, version: int) -> None:
        if version > (trained := self.state.versions["TRAINED"]):
            self._say(f"version {version} is gathered, and step {trained} is the last that was trained")
        self._gathered.add(version)

    def _check_service(self, version: int, replicas: int) -> None:
        if version not in self._gathered:
            self._say(f"version {version} is served, and was never gathered")
        if self.served and version <= self.served[-1][1]:
            self._say(f"version {version} is served after version {self.served[-1][1]}")
        if replicas < 1:
            self._say(f"version {version} is served by no replica")
        self.served.append((self.state.t, version))

    def _say(self, text: str) -> None:
        self.violations.append(text)


def audit_events(records: Iterable[Mapping[str, Any]]) -> EventAudit:
    """Audit a complete log."""
    audit = EventAudit()
    for record in records:
        audit.take(record)
    return audit
