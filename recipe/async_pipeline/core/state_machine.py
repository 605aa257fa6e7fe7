# SPDX-License-Identifier: Apache-2.0
"""The states of a stage and every legal move between them.

Theory of operation. A lane of a stage works on one item at a time. It waits for the item, then for the
resource that the work needs (a lease on a device pool), works, and hands results on; an item may yield any
number of outputs, including none. Every wait is a separate state, so the log alone shows what a stage was
waiting for, and for how long.

                  START                  ITEM                     LEASE
            IDLE ───────► WAITING_INPUT ──────► WAITING_RESOURCE ───────► RUNNING
                            │   ▲   ▲                                      │ │ ▲
               END_OF_INPUT │   │   └────────────── FINISH ────────────────┘ │ │
                            ▼   │                                     OUTPUT │ │ RESUME
                          DONE  └────────── FINISH ────── WAITING_OUTPUT ◄───┘ │
                                                                 └─────────────┘

    from every state that is not terminal:    FAIL ──► FAILED    STOP ──► STOPPED

DONE means that the input ended and everything was handed on. FAILED means that this stage raised. STOPPED
means that the supervisor ended a healthy stage, because another one failed or the user interrupted the run.
The three are terminal. `TRANSITIONS` is the only authority: a pair that it does not list is illegal, raises,
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, TypeVar

from ..errors import AsyncPipelineError, StageProtocolError
from .events import EventLog


class StageState(Enum):
    """What a lane of a stage is doing."""

    IDLE = auto()
    WAITING_INPUT = auto()
    WAITING_RESOURCE = auto()
    RUNNING = auto()
    WAITING_OUTPUT = auto()
    DONE = auto()
    FAILED = auto()
    STOPPED = auto()


class Event(Enum):
    """What happens to a lane of a stage."""

    START = auto()
    ITEM = auto()
    LEASE = auto()
    OUTPUT = auto()
    RESUME = auto()
    FINISH = auto()
    END_OF_INPUT = auto()
    FAIL = auto()
    STOP = auto()


TRANSITIONS: dict[tuple[StageState, Event], StageState] = {
    (StageState.IDLE, Event.START): StageState.WAITING_INPUT,
    (StageState.IDLE, Event.FAIL): StageState.FAILED,
    (StageState.IDLE, Event.STOP): StageState.STOPPED,
    (StageState.WAITING_INPUT, Event.ITEM): StageState.WAITING_RESOURCE,
    (StageState.WAITING_INPUT, Event.END_OF_INPUT): StageState.DONE,
    (StageState.WAITING_INPUT, Event.FAIL): StageState.FAILED,
    (StageState.WAITING_INPUT, Event.STOP): StageState.STOPPED,
    (StageState.WAITING_RESOURCE, Event.LEASE): StageState.RUNNING,
    (StageState.WAITING_RESOURCE, Event.FAIL): StageState.FAILED,
    (StageState.WAITING_RESOURCE, Event.STOP): StageState.STOPPED,
    (StageState.RUNNING, Event.OUTPUT): StageState.WAITING_OUTPUT,
    (StageState.RUNNING, Event.FINISH): StageState.WAITING_INPUT,
    (StageState.RUNNING, Event.FAIL): StageState.FAILED,
    (StageState.RUNNING, Event.STOP): StageState.STOPPED,
    (StageState.WAITING_OUTPUT, Event.RESUME): StageState.RUNNING,
    (StageState.WAITING_OUTPUT, Event.FINISH): StageState.WAITING_INPUT,
    (StageState.WAITING_OUTPUT, Event.FAIL): StageState.FAILED,
    (StageState.WAITING_OUTPUT, Event.STOP): StageState.STOPPED,
}
"""The next state by state and event. Pairs that are not listed are illegal."""

TERMINAL: frozenset[StageState] = frozenset({StageState.DONE, StageState.FAILED, StageState.STOPPED})
"""States without a transition."""


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def next_state(
    table: Mapping[tuple[S, E], S],
    state: S,
    event: E,
    *,
    name: str = "",
    refusal: type[AsyncPipelineError] = StageProtocolError,
) -> S:
    """Return the state after `event` in `state`.

    Raises `refusal`, with the name of what should have moved, if the table does not list them.
    """
    try:
        return table[state, event]
    except KeyError:
        legal = ", ".join(e.name for s, e in table if s is state) or "none, the state is terminal"
        prefix = f"{name}: " if name else ""
        raise refusal(f"{prefix}{event.name} in {state.name}; legal here: {legal}") from None


class StateMachine:
    """The state of one lane of one stage; every move is logged."""

    def __init__(self, role: str, lane: int, log: EventLog) -> None:
        self._role = role
        self._lane = lane
        self._log = log
        self._state = StageState.IDLE
        self.since_t = 0.0
        """When it entered this state, in seconds of the log's time."""

    @property
    def state(self) -> StageState:
        """The present state; IDLE until the first event."""
        return self._state

    def fire(self, event: Event, **fields: Any) -> None:
        """Move, then log the event with the state after it, the lane if it is not 0, and `fields`.

        Raises StageProtocolError if the event is illegal here; the state is unchanged and nothing is
        logged.
        """
        name = f"{self._role}[{self._lane}]" if self._lane > 0 else self._role
        self._state = next_state(TRANSITIONS, self._state, event, name=name)
        lane = {"lane": self._lane} if self._lane > 0 else {}
        self.since_t = self._log.append(self._role, event.name, self._state.name, **lane, **fields).t
