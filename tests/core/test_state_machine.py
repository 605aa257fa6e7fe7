# SPDX-License-Identifier: Apache-2.0
"""The table of transitions, all of it, and the machine that obeys it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.events import EventLog
from recipe.async_pipeline.core.state_machine import (
    TERMINAL,
    TRANSITIONS,
    Event,
    StageState,
    StateMachine,
    next_state,
)
from recipe.async_pipeline.errors import StageProtocolError

# The contract, written a second time on purpose: do not change it without a decision.
PATHS = """
    IDLE             START         WAITING_INPUT
    WAITING_INPUT    ITEM          WAITING_RESOURCE
    WAITING_RESOURCE LEASE         RUNNING
    RUNNING          OUTPUT        WAITING_OUTPUT
    WAITING_OUTPUT   RESUME        RUNNING
    WAITING_OUTPUT   FINISH        WAITING_INPUT
    RUNNING          FINISH        WAITING_INPUT
    WAITING_INPUT    END_OF_INPUT  DONE
"""
WORKING = ("IDLE", "WAITING_INPUT", "WAITING_RESOURCE", "RUNNING", "WAITING_OUTPUT")

LEGAL = {(s, e): after for s, e, after in map(str.split, PATHS.strip().splitlines())}
LEGAL |= {(s, "FAIL"): "FAILED" for s in WORKING} | {(s, "STOP"): "STOPPED" for s in WORKING}


class Frozen:
    """A clock that stands."""

    def now(self) -> float:
        return 0.0


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", StageState)
def test_every_pair_moves_as_contracted_or_is_rejected(state: StageState, event: Event) -> None:
    after = LEGAL.get((state.name, event.name))
    if after is not None:
        assert next_state(TRANSITIONS, state, event) is StageState[after]
    else:
        with pytest.raises(StageProtocolError) as caught:
            next_state(TRANSITIONS, state, event)
        legal = [e for s, e in LEGAL if s == state.name]
        assert str(caught.value).startswith(f"{event.name} in {state.name}; legal here: ")
        listed = str(caught.value).partition("legal here: ")[2]
        assert sorted(listed.split(", ")) == sorted(legal or ["none", "the state is terminal"])


def test_terminal_states_have_no_transition() -> None:
    left = {s for s, _ in TRANSITIONS}
    assert TERMINAL == {s for s in StageState if s not in left}


def test_every_state_is_reached_and_every_event_is_of_use() -> None:
    reached = {StageState.IDLE}
    while more := {after for (s, _), after in TRANSITIONS.items() if s in reached} - reached:
        reached |= more
    assert reached == set(StageState)
    assert {e for _, e in TRANSITIONS} == set(Event)


def test_a_move_is_logged_with_the_state_after_it_and_the_fields() -> None:
    log = EventLog(Frozen())
    machine = StateMachine("train", 0, log)
    assert machine.state.name == "IDLE"
    machine.fire(Event.START)
    machine.fire(Event.ITEM, step=3, key="a")
    assert machine.state.name == "WAITING_RESOURCE"
    assert [r.as_dict() for r in log.records] == [
        {"t": 0, "role": "train", "event": "START", "state": "WAITING_INPUT"},
        {"t": 0, "role": "train", "event": "ITEM", "state": "WAITING_RESOURCE", "step": 3, "key": "a"},
    ]


def test_only_lanes_after_the_first_are_named() -> None:
    log = EventLog(Frozen())
    StateMachine("generate", 1, log).fire(Event.START)
    assert log.records[0].as_dict()["lane"] == 1
    with pytest.raises(StageProtocolError, match=r"^generate\[2\]: LEASE in IDLE"):
        StateMachine("generate", 2, log).fire(Event.LEASE)
    with pytest.raises(StageProtocolError, match="^generate: LEASE in IDLE"):
        StateMachine("generate", 0, log).fire(Event.LEASE)


def test_the_state_has_moved_before_the_log_is_written() -> None:
    log = EventLog(Frozen())
    machine = StateMachine("train", 0, log)
    seen: list[StageState] = []
    log.subscribe(lambda record: seen.append(machine.state))
    machine.fire(Event.START)
    assert seen == [StageState.WAITING_INPUT]


@given(st.lists(st.sampled_from(Event), max_size=40))
def test_any_sequence_of_events_follows_the_table_and_the_illegal_leave_no_trace(events: list[Event]) -> None:
    log = EventLog(Frozen())
    machine = StateMachine("train", 0, log)
    state = "IDLE"
    logged: list[tuple[str, str | None]] = []
    for event in events:
        after = LEGAL.get((state, event.name))
        if after is None:
            with pytest.raises(StageProtocolError, match=event.name):
                machine.fire(event)
        else:
            machine.fire(event)
            state = after
            logged.append((event.name, after))
        assert machine.state.name == state
    assert [(r.event, r.state) for r in log.records] == logged
