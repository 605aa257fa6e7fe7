# SPDX-License-Identifier: Apache-2.0
"""The states of consumers, every pair of state and event, and what follows from states and versions."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from recipe.async_pipeline.core.state_machine import next_state
from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.fleet.registry import (
    CAN_SERVE,
    HAS_REQUESTS,
    LATE_FACTOR,
    LATE_GRACE_S,
    LOAD_TRANSITIONS,
    TRANSITIONS,
    ConsumerEvent,
    ConsumerState,
    LoadEvent,
    LoadPhase,
    Registry,
)

State, Event = ConsumerState, ConsumerEvent


def path_to(state: ConsumerState) -> list[ConsumerEvent]:
    """Return the shortest way from JOINING to a state."""
    paths: dict[ConsumerState, list[ConsumerEvent]] = {State.JOINING: []}
    while state not in paths:
        for (before, event), after in TRANSITIONS.items():
            if before in paths and after not in paths:
                paths[after] = [*paths[before], event]
    return paths[state]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(ConsumerState, ConsumerEvent)))
def test_every_pair_of_state_and_event(state: ConsumerState, event: ConsumerEvent) -> None:
    registry = Registry()
    member = registry.add("a")
    for step in path_to(state):
        registry.fire("a", step)
    if (state, event) in TRANSITIONS:
        assert next_state(TRANSITIONS, state, event) is TRANSITIONS[state, event]
        registry.fire("a", event)
        assert member.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(WeightSyncError, match=f"a: {event.name} in {state.name}; legal here: "):
            registry.fire("a", event)
        assert member.state is state


def test_only_a_consumer_that_has_left_cannot_be_removed() -> None:
    leaves = {state for state, event in TRANSITIONS if event is Event.LEAVE}
    assert leaves == set(State) - {State.LEAVING, State.LEFT}
    assert not [event for state, event in TRANSITIONS if state is State.LEFT]


def test_a_restart_leads_through_a_load_into_the_rotation() -> None:
    """Nothing enters the rotation but from a state in which a load was verified."""
    assert {state for (state, _), after in TRANSITIONS.items() if after is State.SERVING} == {
        State.JOINING,
        State.BEHIND,
    }
    assert TRANSITIONS[State.FENCED, Event.RESTART] is State.JOINING


def registry_of(**versions: int | None) -> Registry:
    """Return a registry whose consumers serve these versions; the newest one is offered."""
    registry = Registry()
    for name, version in versions.items():
        registry.add(name, State.SERVING).version = version
    known = [version for version in versions.values() if version is not None]
    if known:
        registry.offer(max(known))
    return registry


def load(registry: Registry, name: str, began: float, ended: float) -> None:
    registry.begin_prepare(name, began)
    commit(registry, name, began, ended)


def commit(registry: Registry, name: str, began: float, ended: float) -> None:
    """Finish a load whose preparation is ready at `began`."""
    registry.end_prepare(name, began)
    registry.begin_commit(name, began)
    registry.end_commit(name, ended)


LOAD_CALLS = {
    LoadEvent.PREPARE: lambda registry: registry.begin_prepare("a", 1.0),
    LoadEvent.READY: lambda registry: registry.end_prepare("a", 1.0),
    LoadEvent.COMMIT: lambda registry: registry.begin_commit("a", 1.0),
    LoadEvent.DONE: lambda registry: registry.end_commit("a", 1.0),
    LoadEvent.VOID: lambda registry: registry.void_load("a"),
}
WAY_TO = {
    LoadPhase.NO_LOAD: [],
    LoadPhase.PREPARING: [LoadEvent.PREPARE],
    LoadPhase.PREPARED: [LoadEvent.PREPARE, LoadEvent.READY],
    LoadPhase.COMMITTING: [LoadEvent.PREPARE, LoadEvent.READY, LoadEvent.COMMIT],
}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(LoadPhase, LoadEvent)))
def test_every_pair_of_load_phase_and_event(phase: LoadPhase, event: LoadEvent) -> None:
    registry = registry_of(a=3)
    registry.offer(4)
    member = registry.members["a"]
    for step in WAY_TO[phase]:
        LOAD_CALLS[step](registry)
    before = dataclasses.replace(member)
    if (phase, event) not in LOAD_TRANSITIONS:
        with pytest.raises(WeightSyncError, match=f"a: {event.name} in {phase.name}; legal here: "):
            LOAD_CALLS[event](registry)
        assert member == before
        return
    LOAD_CALLS[event](registry)
    assert member.phase is LOAD_TRANSITIONS[phase, event]
    assert (member.loading is None) == (member.phase is LoadPhase.NO_LOAD)
    assert (member.reading is None) == (member.phase is not LoadPhase.COMMITTING)
    assert member.version == (4 if event is LoadEvent.DONE else 3)


@pytest.mark.parametrize("phase", LoadPhase)
@pytest.mark.parametrize("event", [Event.FAIL, Event.LEAVE])
def test_a_failure_ends_a_load_in_each_phase_but_not_its_reading(
    phase: LoadPhase, event: ConsumerEvent
) -> None:
    registry = registry_of(a=3)
    registry.offer(4)
    for step in WAY_TO[phase]:
        LOAD_CALLS[step](registry)
    registry.fire("a", event)
    member = registry.members["a"]
    assert (member.phase, member.loading) == (LoadPhase.NO_LOAD, None)
    assert member.reading == (4 if phase is LoadPhase.COMMITTING else None)
    assert registry.commits_in_rotation() == 0


def test_a_version_is_served_by_all_of_the_rotation_or_not() -> None:
    registry = registry_of(a=3, b=2)
    assert (registry.serves(2), registry.serves(3)) == (True, False)
    registry.fire("b", Event.LATE)
    assert registry.serves(3), "one that is behind does not count"
    registry.fire("a", Event.FAIL)
    assert not registry.serves(0), "no consumer serves"
    assert registry.can_serve
    for name in "ab":
        registry.fire(name, Event.LEAVE)
    assert not registry.can_serve


def test_versions_only_move_forward() -> None:
    registry = registry_of(a=3)
    for version in (2, 3):
        with pytest.raises(WeightSyncError, match=f"v{version} offered after v3; versions only move forward"):
            registry.offer(version)


def test_a_consumer_loads_the_newest_version_that_is_in_memory() -> None:
    registry = registry_of(a=None)
    assert registry.wanted("a") is None
    registry.offer(4)
    assert registry.wanted("a") == 4
    registry.retire(3)
    assert registry.wanted("a") == 4
    registry.retire(4)
    assert registry.wanted("a") is None, "until the next one is offered"
    registry.offer(5)
    load(registry, "a", 0.0, 1.0)
    assert registry.wanted("a") is None


def test_a_load_that_is_void_leaves_the_version_as_it_was() -> None:
    registry = registry_of(a=3)
    registry.offer(4)
    registry.begin_prepare("a", 0.0)
    registry.void_load("a")
    member = registry.members["a"]
    assert (member.version, member.loading, member.reading) == (3, None, None)


def test_a_restart_forgets_the_version() -> None:
    registry = registry_of(a=3, b=3)
    registry.fire("a", Event.FAIL)
    registry.members["a"].why = "it died"
    registry.fire("a", Event.RESTART)
    assert registry.members["a"].version is None
    assert registry.wanted("a") == 3
    registry.fire("a", Event.SERVE)
    assert registry.members["a"].why == ""


def test_a_name_is_free_once_its_consumer_has_left() -> None:
    registry = registry_of(a=3)
    with pytest.raises(WeightSyncError, match="a is SERVING already; choose another name"):
        registry.add("a")
    for event in (Event.LEAVE, Event.END):
        registry.fire("a", event)
    assert registry.add("a").state is State.JOINING


def late_after(longest_s: float) -> float:
    return LATE_FACTOR * longest_s + LATE_GRACE_S


def test_a_load_is_compared_with_the_loads_of_the_others() -> None:
    registry = registry_of(a=None, b=None, c=None)
    registry.offer(0)
    registry.begin_prepare("a", 0.0)
    assert registry.late_at("a") is None, "there is no load to compare it with"
    load(registry, "b", 0.0, 5.0)
    assert registry.late_at("a") == late_after(5.0)
    load(registry, "c", 0.0, 9.0)
    assert registry.late_at("a") == registry.next_late() == late_after(9.0)
    assert registry.late_at("b") is None, "it does not load"
    assert registry.late(late_after(9.0) - 0.1) == []
    assert registry.late(late_after(9.0)) == ["a"]


def test_without_a_load_of_the_same_version_the_last_ones_count_but_not_the_first_of_a_process() -> None:
    registry = registry_of(a=None, b=None)
    for version, ended in ((0, 50.0), (1, 101.0)):
        registry.offer(version)
        for name in "ab":
            load(registry, name, 100.0 * version, ended)
        registry.offer(version + 10)
        registry.begin_prepare("a", 200.0)
        assert registry.late_at("a") == (None if version == 0 else 200.0 + late_after(1.0))
        registry.void_load("a")
        registry.newest = version


def test_the_wait_for_a_turn_is_not_late_and_is_no_part_of_the_load() -> None:
    registry = registry_of(a=None, b=None)
    registry.offer(0)
    load(registry, "b", 0.0, 5.0)
    registry.begin_prepare("a", 0.0)
    assert registry.late_at("a") == late_after(5.0)
    registry.end_prepare("a", 2.0)
    assert registry.late_at("a") is None and registry.commits_in_rotation() == 0
    registry.begin_commit("a", 102.0)
    assert registry.commits_in_rotation() == 1
    assert registry.late_at("a") == 100.0 + late_after(5.0)
    registry.end_commit("a", 105.0)
    assert (registry.members["a"].load_s, registry.members["a"].commit_s) == (5.0, 3.0)


def test_the_longest_commit_is_that_of_the_last_load_of_each_in_the_rotation() -> None:
    registry = registry_of(a=None, b=None, c=None)
    for version, commits in enumerate(({"a": 50.0, "b": 60.0}, {"a": 9.0}, {"a": 1.0, "b": 2.0})):
        assert registry.longest_commit_s() == (9.0 if version == 2 else None), "no first load of a process"
        registry.offer(version)
        for name, seconds in commits.items():
            registry.begin_prepare(name, 0.0)
            commit(registry, name, 100.0, 100.0 + seconds)
    assert registry.longest_commit_s() == 2.0
    registry.fire("b", Event.LATE)
    assert registry.longest_commit_s() == 1.0


def test_one_consumer_always_stays_in_the_rotation() -> None:
    registry = registry_of(a=None, b=None)
    for version in (0, 1):
        registry.offer(version)
        for name in "ab":
            load(registry, name, 0.0, 1.0)
    registry.offer(2)
    registry.begin_prepare("b", 0.0)
    registry.begin_prepare("a", 1.0)
    assert registry.late(1000.0) == ["b"], "the one that began first"
    registry.fire("b", Event.LATE)
    assert registry.late(1000.0) == [] and registry.next_late() is None


@pytest.mark.parametrize("state", ConsumerState)
def test_memory_is_in_use_by_consumers_that_may_generate_with_it(state: ConsumerState) -> None:
    registry = registry_of(a=None)
    registry.offer(7)
    registry.begin_prepare("a", 0.0)
    registry.end_prepare("a", 0.0)
    member = registry.members["a"]
    member.state = state
    assert registry.in_the_way(7) == [], "what is only prepared is never served"
    registry.begin_commit("a", 0.0)
    used = state in HAS_REQUESTS or state is State.FENCED
    assert (registry.in_the_way(7) == [member]) == used
    assert registry.in_the_way(6) == [], "an older version"
    assert CAN_SERVE & {State.AWAY, State.LEAVING, State.LEFT} == frozenset()
