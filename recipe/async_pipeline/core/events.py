# SPDX-License-Identifier: Apache-2.0
"""The append-only log of what every stage did. `replay` reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .waits.clock import Clock

Interval = tuple[float, float]
"""Start and end in seconds of the log's time, start < end."""
SLOWEST_TURNS = "slowest_turns"
"""Field of ANSWERED: start, since the episode began, and seconds of each turn of the last episode."""


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One event of one stage."""

    t: float
    """Seconds since the log was opened."""
    role: str
    event: str
    state: str | None
    """State of the stage's lane after the event; None if the event does not change a state."""
    fields: Mapping[str, Any]
    """Where they apply: lane, step, version, key, why, ..."""

    def as_dict(self) -> dict[str, Any]:
        """One flat mapping: t to the microsecond, role, event, state unless None, then the fields."""
        state = {} if self.state is None else {"state": self.state}
        return {"t": round(self.t, 6), "role": self.role, "event": self.event, **state, **self.fields}

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> LogRecord:
        """Return the record of such a mapping. Raises KeyError or ValueError if it is not one."""
        fields = dict(flat)
        return cls(
            t=float(fields.pop("t")),
            role=str(fields.pop("role")),
            event=str(fields.pop("event")),
            state=fields.pop("state", None),
            fields=fields,
        )


Subscriber = Callable[[LogRecord], object]
Guard = Callable[[str, Subscriber], Subscriber]
"""Wraps a subscriber, given its name."""


def unguarded(name: str, subscriber: Subscriber) -> Subscriber:
    """Return the subscriber as it is: its errors reach the stage that appended the record."""
    return subscriber


class EventLog:
    """Records in the order in which they were appended; `t` never goes back.

    The log opens with its first record, whose `t` is 0, so it may be made before any loop runs.
    `keep` bounds the memory to the last `keep` records; subscribers see all of them. For use on one
    event loop, not from threads.
    """

    def __init__(self, clock: Clock, *, keep: int | None = None, guard: Guard = unguarded) -> None:
        """`guard` wraps each subscriber; it decides what happens to an error of that subscriber."""
        if keep is not None and keep < 1:
            raise ValueError(f"an event log must keep at least 1 record, got keep={keep}; None keeps all")
        self._clock, self._guard = clock, guard
        self._opened: float | None = None
        self._last_t = 0.0
        self._records: deque[LogRecord] = deque(maxlen=keep)
        self._subscribers: list[Subscriber] = []

    @property
    def records(self) -> Sequence[LogRecord]:
        """A snapshot of the records that are kept, oldest first; costs a copy."""
        return tuple(self._records)

    def append(self, role: str, event: str, state: str | None = None, **fields: Any) -> LogRecord:
        """Stamp a record, keep it, and hand it to every subscriber before returning it.

        Raises ValueError if a field is called `t`, which is the time, and what a subscriber raises
        through its guard.
        """
        if "t" in fields:
            raise ValueError(f"{role} {event}: no field can be called 't', that is the time")
        record = LogRecord(t=self.elapsed(), role=role, event=event, state=state, fields=fields)
        self._records.append(record)
        for callback in self._subscribers:
            callback(record)
        return record

    def subscribe(self, callback: Subscriber, *, name: str = "") -> None:
        """Call `callback` with each later record, in order. It must not append.

        `name` identifies it in messages; the default is the name of its class or function.
        """
        shown = name or getattr(callback, "__qualname__", type(callback).__name__)
        self._subscribers.append(self._guard(shown, callback))

    def elapsed(self) -> float:
        """Return the seconds since the log was opened; opens it if necessary."""
        now = self._clock.now()
        if self._opened is None:
            self._opened = now
        self._last_t = max(self._last_t, now - self._opened)
        return self._last_t


def overlap_seconds(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Return the seconds that are in an interval of `a` and of `b`; each list is disjoint and ordered."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
