# SPDX-License-Identifier: Apache-2.0
"""The consumers of published weights: the state and the version of each, and what follows from them.

Theory of operation. A consumer computes with published weights, and pulls each version by itself. The
*rotation* is the set of consumers that get new requests: those in state SERVING. A version counts as served
when every consumer of the rotation serves it, so a consumer outside of the rotation delays no weight update.

                 SERVE                  LATE
     JOINING ───────────────► SERVING ───────► BEHIND
        ▲  │                   │    ▲            │  │
        │  │ FAIL         FAIL │    └── SERVE ───┘  │ FAIL
        │  ▼                   ▼                    ▼
        └─ FENCED ◄────────────┴────────────────────┘
    RESTART  │
             │ GIVE_UP
             ▼
            AWAY                    from every state above:  LEAVE ──► LEAVING ── END ──► LEFT

JOINING: starts or loads; has no requests. BEHIND: too slow for a weight update; it keeps its open requests,
gets no new ones, and returns when it has the newest version. FENCED: failed, and is being restarted. AWAY:
did not return after several restarts. LEAVING: finishes its open requests, then its processes end.

A load has two parts. All consumers prepare a version at once, while they generate; a commit holds an engine
between two of its steps, so consumers of the rotation take turns to commit:

              PREPARE               READY            COMMIT                DONE
     NO_LOAD ─────────► PREPARING ────────► PREPARED ───────► COMMITTING ───────► NO_LOAD
        ▲                   │ VOID             │ VOID             │ VOID
        └───────────────────┴──────────────────┴──────────────────┘

VOID: a newer version replaces this one, or its memory was overwritten.
`TRANSITIONS` and `LOAD_TRANSITIONS` are the only authority: a pair that they do not list is illegal, raises,
and changes nothing.

Pure: no clock, task or Ray handle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from ...core.state_machine import next_state
from ...errors import WeightSyncError

LATE_FACTOR = 3.0
"""A load is late if it takes this many times as long as the longest load of the others: replicas of one size
differ by less, on one host (the same copies) and between hosts (the same network). The wait for a turn to
commit does not count.
"""
LATE_GRACE_S = 10.0
"""Added to that. A load of milliseconds may wait for a step of its engine, and a bucket with a wrong checksum
is read four times in as many seconds; neither is a slow replica.
"""


class ConsumerState(Enum):
    """What a consumer is doing."""

    JOINING = auto()
    SERVING = auto()
    BEHIND = auto()
    FENCED = auto()
    AWAY = auto()
    LEAVING = auto()
    LEFT = auto()


class ConsumerEvent(Enum):
    """What happens to a consumer."""

    SERVE = auto()
    LATE = auto()
    FAIL = auto()
    RESTART = auto()
    GIVE_UP = auto()
    LEAVE = auto()
    END = auto()


class LoadPhase(Enum):
    """How far the load of a version is."""

    NO_LOAD = auto()
    PREPARING = auto()
    PREPARED = auto()
    COMMITTING = auto()


class LoadEvent(Enum):
    """What happens to a load."""

    PREPARE = auto()
    READY = auto()
    COMMIT = auto()
    DONE = auto()
    VOID = auto()


State, Event, Phase = ConsumerState, ConsumerEvent, LoadPhase
TRANSITIONS: dict[tuple[ConsumerState, ConsumerEvent], ConsumerState] = {
    (State.JOINING, Event.SERVE): State.SERVING,
    (State.JOINING, Event.FAIL): State.FENCED,
    (State.JOINING, Event.LEAVE): State.LEAVING,
    (State.SERVING, Event.LATE): State.BEHIND,
    (State.SERVING, Event.FAIL): State.FENCED,
    (State.SERVING, Event.LEAVE): State.LEAVING,
    (State.BEHIND, Event.SERVE): State.SERVING,
    (State.BEHIND, Event.FAIL): State.FENCED,
    (State.BEHIND, Event.LEAVE): State.LEAVING,
    (State.FENCED, Event.RESTART): State.JOINING,
    (State.FENCED, Event.GIVE_UP): State.AWAY,
    (State.FENCED, Event.LEAVE): State.LEAVING,
    (State.AWAY, Event.LEAVE): State.LEAVING,
    (State.LEAVING, Event.END): State.LEFT,
}
"""The next state by state and event. Pairs that are not listed are illegal."""
LOAD_TRANSITIONS: dict[tuple[LoadPhase, LoadEvent], LoadPhase] = {
    (Phase.NO_LOAD, LoadEvent.PREPARE): Phase.PREPARING,
    (Phase.PREPARING, LoadEvent.READY): Phase.PREPARED,
    (Phase.PREPARED, LoadEvent.COMMIT): Phase.COMMITTING,
    (Phase.COMMITTING, LoadEvent.DONE): Phase.NO_LOAD,
    (Phase.PREPARING, LoadEvent.VOID): Phase.NO_LOAD,
    (Phase.PREPARED, LoadEvent.VOID): Phase.NO_LOAD,
    (Phase.COMMITTING, LoadEvent.VOID): Phase.NO_LOAD,
}
"""The next phase of a load by phase and event. Pairs that are not listed are illegal."""

HAS_REQUESTS = frozenset({State.SERVING, State.BEHIND, State.LEAVING})
"""States in which a consumer may have open requests."""
CAN_SERVE = frozenset({State.JOINING, State.SERVING, State.BEHIND, State.FENCED})
"""States from which a consumer serves a later version without a new start by the user."""


@dataclass(kw_only=True)
class Member:
    """One consumer, as far as decisions need it."""

    name: str
    state: ConsumerState = State.JOINING
    version: int | None = None
    """The version that it serves or has loaded last; None before the first load."""
    loading: int | None = None
    """The version that is being loaded."""
    phase: LoadPhase = Phase.NO_LOAD
    """How far that load is."""
    since: float = 0.0
    """When that load began; while it commits, later by its wait for a turn."""
    reading: int | None = None
    """The version whose memory a commit may be reading; outlives a commit that was given up. A version that
    is only prepared from overwritten memory is never committed.
    """
    load_s: float = 0.0
    """Duration of its last load in seconds, without the wait for a turn."""
    commit_s: float = 0.0
    """The part of `load_s` for which it needed a turn."""
    num_loads: int = 0
    """Loads since its processes started."""
    why: str = ""
    """Why it does not serve, after a failure."""


@dataclass(kw_only=True)
class Registry:
    """All consumers of a run, by name. Names of consumers that have left may be used again."""

    members: dict[str, Member] = field(default_factory=dict)
    newest: int | None = None
    """The newest version that was offered."""
    retired: int = -1
    """Versions up to this one are no longer in memory, or will soon be overwritten."""

    def add(self, name: str, state: ConsumerState = State.JOINING) -> Member:
        """Add a consumer. Raises WeightSyncError if there is one of this name."""
        known = self.members.get(name)
        if known is not None and known.state is not State.LEFT:
            raise WeightSyncError(f"{name} is {known.state.name} already; choose another name")
        member = self.members[name] = Member(name=name, state=state)
        return member

    def fire(self, name: str, event: ConsumerEvent) -> None:
        """Move a consumer. Raises WeightSyncError if the event is illegal in its state."""
        member = self.members[name]
        member.state = next_state(TRANSITIONS, member.state, event, name=name, refusal=WeightSyncError)
        if event is Event.SERVE:
            member.why = ""
        elif event is Event.RESTART:
            member.version, member.num_loads = None, 0
        elif event in (Event.FAIL, Event.LEAVE):
            member.loading, member.phase = None, Phase.NO_LOAD

    def within(self, *states: ConsumerState) -> Iterator[Member]:
        """Yield the consumers that are in one of these states."""
        yield from (member for member in self.members.values() if member.state in states)

    @property
    def rotation(self) -> list[Member]:
        """The consumers that get new requests."""
        return list(self.within(State.SERVING))

    @property
    def can_serve(self) -> bool:
        """Whether any consumer serves, or may do so later."""
        return any(member.state in CAN_SERVE for member in self.members.values())

    # Versions.

    def offer(self, version: int) -> None:
        """Make `version` the newest one. Raises WeightSyncError if it is not newer than the last."""
        if self.newest is not None and version <= self.newest:
            raise WeightSyncError(f"v{version} offered after v{self.newest}; versions only move forward")
        self.newest = version

    def retire(self, version: int) -> None:
        """Note that the memory of `version`, and of all older ones, will be overwritten."""
        self.retired = max(self.retired, version)

    def wanted(self, name: str) -> int | None:
        """Return the version that a consumer should load now, or None if it has nothing to load."""
        version = self.members[name].version
        if self.newest is None or self.newest <= self.retired or version == self.newest:
            return None
        return self.newest

    def begin_prepare(self, name: str, now: float) -> int:
        """Note that a consumer begins to prepare the newest version; return that version."""
        member, version = self._load_event(name, LoadEvent.PREPARE), self.wanted(name)
        assert version is not None, "nothing to load"
        member.loading, member.since = version, now
        return version

    def end_prepare(self, name: str, now: float) -> None:
        """Note that a consumer is ready to commit."""
        member = self._load_event(name, LoadEvent.READY)
        member.load_s = now - member.since

    def begin_commit(self, name: str, now: float) -> None:
        """Note that a consumer begins to commit what it has prepared."""
        member = self._load_event(name, LoadEvent.COMMIT)
        member.reading, member.since = member.loading, now - member.load_s

    def end_commit(self, name: str, now: float) -> None:
        """Note that the consumer has loaded its version."""
        member = self._load_event(name, LoadEvent.DONE)
        member.version, member.loading, member.reading = member.loading, None, None
        prepare_s, member.load_s = member.load_s, now - member.since
        member.commit_s, member.num_loads = member.load_s - prepare_s, member.num_loads + 1

    def void_load(self, name: str) -> None:
        """Note that a load has ended, and that its version must not be used."""
        member = self._load_event(name, LoadEvent.VOID)
        member.loading = member.reading = None

    def _load_event(self, name: str, event: LoadEvent) -> Member:
        member = self.members[name]
        member.phase = next_state(LOAD_TRANSITIONS, member.phase, event, name=name, refusal=WeightSyncError)
        return member

    def serves(self, version: int) -> bool:
        """Return whether every consumer of the rotation serves `version`, and at least one does."""
        rotation = self.rotation
        return bool(rotation) and all(m.version is not None and m.version >= version for m in rotation)

    def commits_in_rotation(self) -> int:
        """Return the number of consumers of the rotation that commit."""
        return sum(member.phase is Phase.COMMITTING for member in self.rotation)

    def longest_commit_s(self) -> float | None:
        """Return the longest of the last commits in the rotation, or None if there was none.

        The first load of a process is no measure: it goes through the engine's loader.
        """
        return max((m.commit_s for m in self.rotation if m.num_loads > 1), default=None)

    # Lateness.

    def late_at(self, name: str) -> float | None:
        """Return when the present load of a consumer becomes late, or None if it cannot.

        It is compared with the loads of the same version by the others of the rotation, or, while there are
        none, with their loads of the version before. The first load of a process is no measure: nothing is
        warm, and no request is open. A consumer that is alone in the rotation, or waits for a turn to
        commit, is never late.
        """
        member = self.members[name]
        if member.state is not State.SERVING or member.phase not in (Phase.PREPARING, Phase.COMMITTING):
            return None
        others = [m for m in self.rotation if m is not member]
        same = [m.load_s for m in others if m.version == member.loading]
        compared = same or [m.load_s for m in others if m.num_loads > 1]
        return member.since + LATE_FACTOR * max(compared) + LATE_GRACE_S if compared else None

    def late(self, now: float) -> list[str]:
        """Return the consumers whose loads are late, the earliest first; one always stays in the rotation."""
        due = sorted((at, name) for at, name in self._late_times() if at <= now)
        return [name for _, name in due][: max(0, len(self.rotation) - 1)]

    def next_late(self) -> float | None:
        """Return when the next load becomes late, or None."""
        return min((at for at, _ in self._late_times()), default=None)

    def _late_times(self) -> list[tuple[float, str]]:
        found = [(self.late_at(member.name), member.name) for member in self.rotation]
        return [(at, name) for at, name in found if at is not None]

    def in_the_way(self, version: int) -> list[Member]:
        """Return the consumers that may generate with what they read from the memory of `version` or older.

        A consumer without requests generates nothing: its load is void, and it loads again. So is one that
        only prepares.
        """
        return [
            m
            for m in self.members.values()
            if m.reading is not None
            and m.reading <= version
            and (m.state in HAS_REQUESTS or m.state is State.FENCED)
        ]
