# SPDX-License-Identifier: Apache-2.0
"""Each version reaches all consumers, whichever fail, hang, join and leave meanwhile; in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import ProofError, WaitTimeout, WeightSyncError
from recipe.async_pipeline.weight_sync.fleet.fleet import RETIRE_S, Fleet
from recipe.async_pipeline.weight_sync.fleet.keeper import ATTEMPTS, DRAIN_POLL_S
from recipe.async_pipeline.weight_sync.fleet.registry import LATE_FACTOR, LATE_GRACE_S, ConsumerState
from tests.fakes.consumers import (
    GRACE_S,
    LOAD_S,
    LOAD_TIMEOUT_S,
    RESTART_S,
    Replica,
    distribute,
    newcomer,
    publish,
    run,
    watched,
)

pytestmark = pytest.mark.virtual_time


async def test_who_serves_what_is_known() -> None:
    a, b = Replica("a"), Replica("b", loads=["ok", "raise"])

    fleet = distribute(a, b)
    await publish(fleet, 1)
    assert fleet.versions == {"a": 1, "b": 1}
    await publish(fleet, 2)
    assert fleet.versions == {"a": 2}, "b is fenced"
    await asyncio.sleep(2 * RESTART_S)
    assert fleet.versions == {"a": 2, "b": 2}
    await fleet.close()


async def test_consumers_load_one_after_another() -> None:
    log: list[str] = []

    outcome = await publish(distribute(Replica("a", log=log), Replica("b", log=log)), 0)
    assert len(outcome.reports) == 2
    assert outcome.failures == {}
    assert log == ["a loads 0", "a serves 0", "b loads 0", "b serves 0"], "never all at once"


@pytest.mark.parametrize(
    ("max_concurrent_loads", "seconds"), [(1, 5 * LOAD_S), (2, 3 * LOAD_S), (5, LOAD_S), (9, LOAD_S)]
)
async def test_so_many_load_at_the_same_time(max_concurrent_loads: int, seconds: float) -> None:
    log: list[str] = []

    replicas = [Replica(str(i), log=log) for i in range(5)]
    assert (
        len((await publish(distribute(*replicas, max_concurrent_loads=max_concurrent_loads), 0)).reports) == 5
    )
    assert asyncio.get_running_loop().time() == seconds
    loading, most = 0, 0
    for line in log:
        loading += 1 if " loads " in line else -1
        most = max(most, loading)
    assert most == min(max_concurrent_loads, 5)


@pytest.mark.parametrize(("what", "seconds"), [("raise", LOAD_S), ("hang", LOAD_TIMEOUT_S + GRACE_S)])
async def test_one_that_fails_is_fenced_and_comes_back_at_the_current_version(
    what: str, seconds: float
) -> None:
    log: list[str] = []
    said: list[str] = []
    bad, good = Replica("bad", log=log, loads=["ok", what]), Replica("good", log=log)

    fleet = distribute(bad, good, say=said.append)
    loop = asyncio.get_running_loop()
    await publish(fleet, 0)
    started = loop.time()
    outcome = await publish(fleet, 1)
    assert len(outcome.reports) == 1
    assert outcome.failures == fleet.fenced
    assert loop.time() - started == seconds + LOAD_S, "the update does not wait for the restart"
    assert (bad.working, good.version) == (False, 1)
    assert list(fleet.fenced) == ["bad"]
    assert (await publish(fleet, 2)).failures == {}, "the failure of the update before is not repeated"
    await asyncio.sleep(RESTART_S + LOAD_S)
    assert (bad.working, bad.version, fleet.fenced) == (True, 2, {})
    await publish(fleet, 3)
    assert bad.version == 3
    assert "bad loads 1" in log and log.count("bad loads 2") == 1
    assert said[0].startswith("bad is fenced and restarts; 1 still serve. ")
    assert said[1] == "bad serves again, version 2"


async def test_at_the_first_publication_the_last_one_that_fails_ends_it() -> None:
    """Nothing has ever worked, so a restart is no remedy."""

    fleet = distribute(Replica("a", loads=["raise"]), Replica("b", loads=["hang"]))
    with pytest.raises(WaitTimeout, match="waited 11 s for b to load version 0; b does not respond"):
        await publish(fleet, 0)
    async with fleet.weights("another task"):
        pass
    await fleet.close()


async def test_an_update_without_consumers_waits_for_the_first_to_return() -> None:
    notes: list[tuple[str, str, int | None]] = []
    a, b = Replica("a", loads=["ok", "raise"], restarts=["raise"]), Replica("b", loads=["ok", "raise"])

    fleet = distribute(a, b, note=lambda *what: notes.append(what))
    loop = asyncio.get_running_loop()
    await publish(fleet, 0)
    started = loop.time()
    assert len((await publish(fleet, 1)).reports) == 1
    assert loop.time() - started <= 3 * LOAD_S + RESTART_S, "b's; a needs a second attempt"
    assert fleet.versions == {"b": 1}
    assert len((await publish(fleet, 2)).reports) == 1
    await asyncio.sleep(2 * RESTART_S)
    assert fleet.versions == {"a": 2, "b": 2}
    assert notes == [
        ("FENCED", "a", None),
        ("FENCED", "b", None),
        ("ABSENT", "a", None),
        ("REJOINED", "b", 1),
        ("REJOINED", "a", 2),
    ]


async def test_an_update_raises_the_last_error_if_no_consumer_returns() -> None:
    fleet = distribute(Replica("a", loads=["ok", "raise"], restarts=["raise"] * ATTEMPTS))
    await publish(fleet, 0)
    with pytest.raises(ProofError, match="a: other values"):
        await publish(fleet, 1)


async def test_watch_raises_if_no_consumer_returns() -> None:
    fleet = distribute(Replica("a", checks=["raise"], restarts=["raise"] * ATTEMPTS))
    watch = watched(fleet)
    await publish(fleet, 0)
    with pytest.raises(ProofError, match="a: other values"):
        await watch


async def test_a_version_that_is_not_newer_is_refused() -> None:
    fleet = distribute(Replica("a"))
    await publish(fleet, 3)
    with pytest.raises(WeightSyncError, match="v3 offered after v3"):
        await publish(fleet, 3)


async def test_a_task_can_hold_the_weights() -> None:
    replica = Replica("a")
    fleet = distribute(replica)
    async with fleet.weights("validation"):
        task = asyncio.create_task(publish(fleet, 0))
        await asyncio.sleep(100)
        assert replica.version is None
    await task
    assert replica.version == 0


async def test_the_wait_for_held_weights_has_a_deadline() -> None:
    fleet = Fleet(
        [Replica("a")], lambda line: None, load_timeout_s=10, restart_timeout_s=50, wait_timeout_s=300
    )
    async with fleet.weights("validation"):
        with pytest.raises(
            WaitTimeout,
            match="param_update waited 300 s for the replicas' weights; validation has them",
        ):
            await publish(fleet, 0)
    assert len((await publish(fleet, 0)).reports) == 1, "and nothing is held by the one that gave up"


async def test_a_balancer_that_does_not_answer_ends_it() -> None:
    class Deaf(Replica):
        async def leave(self) -> None:
            await asyncio.sleep(1e6)

    fleet = distribute(Deaf("a", loads=["raise"]), Replica("b"))
    with pytest.raises(WaitTimeout, match="param_update waited 60 s for the balancer to remove a"):
        await publish(fleet, 0)


STEPS = st.lists(st.sampled_from(["ok", "ok", "raise", "hang"]), max_size=8)
RESTARTS = st.lists(st.sampled_from(["ok", "ok", "raise", "hang"]), max_size=4)


@pytest.mark.slow
@given(
    scripts=st.lists(st.tuples(STEPS, STEPS, RESTARTS, STEPS), min_size=1, max_size=3),
    gaps=st.lists(st.floats(0, 60, allow_nan=False), min_size=1, max_size=12),
    max_concurrent_loads=st.integers(1, 3),
)
@settings(max_examples=60)
def test_after_any_failure_serving_consumers_are_current_and_others_return(
    scripts: list[tuple[list[str], ...]],
    gaps: list[float],
    max_concurrent_loads: int,
) -> None:
    replicas = [
        Replica(
            f"r{i}", loads=["ok", *a], restarts=list(b), checks=list(c), prepares=["ok", *d], prepare_s=1.0
        )
        for i, (a, b, c, d) in enumerate(scripts)
    ]

    async def scenario() -> None:
        fleet = distribute(*replicas, max_concurrent_loads=max_concurrent_loads)
        watch = watched(fleet)
        try:
            for version, gap in enumerate(gaps):
                assert (await publish(fleet, version)).reports
                for replica in replicas:
                    assert (replica in fleet.serving) == replica.working == (replica.name not in fleet.fenced)
                    if replica.working:
                        assert replica.version == version
                await asyncio.sleep(gap)
            await asyncio.sleep(1500)
        except (ProofError, WaitTimeout):
            assert all(not replica.working for replica in replicas), "no replica is left"
            await asyncio.gather(watch, return_exceptions=True)
            return
        for replica in replicas:
            if not replica.working:
                assert replica.name in fleet.fenced, "its fate is recorded"
            else:
                assert replica.version == len(gaps) - 1
        watch.cancel()
        await fleet.close()

    run(scenario)


def deadline(**more: Any) -> dict[str, Any]:
    """Return a deadline of a load that is far away."""
    return {"load_timeout_s": 1000.0, **more}


Notes = list[tuple[str, str, int | None]]


def noted(notes: Notes) -> dict[str, Any]:
    return {"note": lambda *what: notes.append(what)}


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_newcomer_is_proved_before_it_serves_and_delays_no_update() -> None:
    notes: Notes = []
    a, new = Replica("a"), newcomer("new", loads=["100", "100", "7"])

    fleet = distribute(a, **deadline(**noted(notes)))
    await publish(fleet, 0)
    fleet.add(new)
    assert fleet.registry.members["new"].state is ConsumerState.JOINING
    for version in range(1, 12):
        started = now()
        await publish(fleet, version)
        assert now() - started == LOAD_S, "one slot to load, and the newcomer takes none"
        assert not new.working and fleet.versions == {"a": version}
        await asyncio.sleep(18)
    await asyncio.sleep(40)
    assert (new.working, new.version) == (True, 11)
    assert fleet.versions == {"a": 11, "new": 11}
    await publish(fleet, 12)
    assert fleet.versions == {"a": 12, "new": 12}
    assert notes == [("JOINING", "new", None), ("JOINED", "new", 11)]


async def test_one_that_joins_during_an_update_has_the_version_of_that_update() -> None:
    fleet = distribute(Replica("a", loads=["ok", "60"]), **deadline())
    await publish(fleet, 0)
    update = asyncio.create_task(publish(fleet, 1))
    await asyncio.sleep(1)
    fleet.add(newcomer("new"))
    await asyncio.sleep(RESTART_S + LOAD_S / 2)
    assert fleet.versions == {"a": 0}
    assert len((await update).reports) == 1
    assert fleet.versions == {"new": 1}, "a is late now"
    await asyncio.sleep(60)
    assert fleet.versions == {"a": 1, "new": 1}


async def test_a_version_that_is_offered_while_a_newcomer_enters_waits_for_it() -> None:
    class SlowlyListed(Replica):
        async def join(self) -> None:
            await asyncio.sleep(5)
            await super().join()

    new = SlowlyListed("new", working=False)
    fleet = distribute(Replica("a"), max_concurrent_loads=2, **deadline())
    await publish(fleet, 0)
    fleet.add(new)
    await asyncio.sleep(RESTART_S + LOAD_S + 1)
    assert fleet.registry.members["new"].version == 0 and not new.working
    await publish(fleet, 1)
    assert (new.version, new.working) == (1, True), "it gets no request for version 1 before it serves it"


@pytest.mark.parametrize(("start", "load"), [("raise", "ok"), ("ok", "raise")])
async def test_a_newcomer_that_fails_leaves_and_is_no_failure_of_an_update(start: str, load: str) -> None:
    notes: Notes = []
    said: list[str] = []
    new = newcomer("new", restarts=[start], loads=[load])

    fleet = distribute(Replica("a", loads=["ok", "40"]), say=said.append, **deadline(**noted(notes)))
    await publish(fleet, 0)
    fleet.add(new)
    assert (await publish(fleet, 1)).failures == {}
    assert [m.name for m in fleet.members] == ["a"]
    fleet.add(newcomer("new"))
    await asyncio.sleep(RESTART_S + LOAD_S + 1)
    assert fleet.versions == {"a": 1, "new": 1}, "its name is free again"
    assert notes[:2] == [("JOINING", "new", None), ("LEFT", "new", None)]
    assert new.log[-1] == "new is gone"
    assert said[0] == "new could not join: ProofError: new: other values"


async def test_one_that_is_much_slower_than_the_others_leaves_the_rotation_until_it_has_caught_up() -> None:
    notes: Notes = []
    slow, others = Replica("slow", loads=["ok", "ok", "100"]), [Replica("a"), Replica("b")]
    late_s = LATE_FACTOR * LOAD_S + LATE_GRACE_S

    fleet = distribute(slow, *others, max_concurrent_loads=3, **deadline(**noted(notes)))
    for version in (0, 1):
        await publish(fleet, version)
    started = now()
    outcome = await publish(fleet, 2)
    assert now() - started == late_s
    assert (len(outcome.reports), outcome.failures) == (2, {})
    assert (slow.working, slow.version) == (False, 1), "no new requests; the open ones continue"
    started = now()
    await publish(fleet, 3)
    assert now() - started == LOAD_S, "it delays no other update"
    await asyncio.sleep(100)
    assert fleet.versions == {"slow": 3, "a": 3, "b": 3}
    await publish(fleet, 4)
    assert fleet.versions == {"slow": 4, "a": 4, "b": 4}
    assert notes == [("BEHIND", "slow", 1), ("CAUGHT_UP", "slow", 3)]


async def test_one_that_holds_the_only_slot_gives_it_up_when_it_is_late() -> None:
    slow = Replica("slow", loads=["ok", "ok", "hang"])

    fleet = distribute(slow, Replica("a"), Replica("b"), **deadline())
    for version in (0, 1):
        await publish(fleet, version)
    await publish(fleet, 2)
    assert fleet.versions == {"a": 2, "b": 2}


async def test_the_only_one_is_never_late() -> None:
    fleet = distribute(Replica("a", loads=["ok", "ok", "500"]), **deadline())
    for version in range(3):
        await publish(fleet, version)
    assert fleet.versions == {"a": 2}


async def test_of_late_ones_one_stays_in_the_rotation() -> None:
    slow = [Replica(name, loads=["ok", "ok", "90"]) for name in "ab"]
    fleet = distribute(*slow, max_concurrent_loads=2, **deadline())
    for version in range(3):
        await publish(fleet, version)
        assert fleet.serving
    await asyncio.sleep(1)
    assert fleet.versions == {"a": 2, "b": 2}


async def test_the_failure_of_the_only_replica_counts_although_it_is_back() -> None:
    fleet = distribute(Replica("a", loads=["ok", "raise"]))
    await publish(fleet, 0)
    outcome = await publish(fleet, 1)
    assert len(outcome.reports) == 1
    assert outcome.failures == {"a": "ProofError: a: other values"}
    assert (await publish(fleet, 2)).failures == {}


async def test_one_that_leaves_finishes_its_requests_and_is_no_failure() -> None:
    notes: Notes = []
    leaving = Replica("leaving", requests=[3, 1, 0])

    fleet = distribute(leaving, Replica("a"), **deadline(**noted(notes)))
    await publish(fleet, 0)
    fleet.remove("leaving", 100.0)
    outcome = await publish(fleet, 1)
    assert (leaving.working, leaving.version) == (False, 0), "no new requests, and no version any more"
    assert outcome.failures == {} and len(outcome.reports) == 1
    await asyncio.sleep(DRAIN_POLL_S - 0.1)
    assert "leaving is gone" not in leaving.log
    await asyncio.sleep(1)
    assert leaving.log[-1] == "leaving is gone" and leaving.version is None
    assert [m.name for m in fleet.members] == ["a"]
    assert notes == [("LEAVING", "leaving", 0), ("LEFT", "leaving", 0)]


async def test_one_that_leaves_hands_over_what_it_does_not_finish_in_time() -> None:
    leaving = Replica("leaving", requests=[1] * 1000)

    fleet = distribute(leaving, Replica("a"))
    await publish(fleet, 0)
    fleet.remove("leaving", 30.0)
    await asyncio.sleep(29)
    assert "leaving is gone" not in leaving.log
    await asyncio.sleep(2)
    assert leaving.log[-1] == "leaving is gone"


async def test_an_update_does_not_wait_for_one_that_is_removed_meanwhile() -> None:
    leaving = Replica("leaving", loads=["ok", "hang"])
    fleet = distribute(leaving, Replica("a"), max_concurrent_loads=2, **deadline())
    await publish(fleet, 0)
    update = asyncio.create_task(publish(fleet, 1))
    await asyncio.sleep(5)
    assert not update.done()
    fleet.remove("leaving", 10.0)
    assert (await update).failures == {}
    await asyncio.sleep(20)
    assert leaving.log[-1] == "leaving is gone"


@pytest.mark.parametrize("what", ["ok", "raise"])
async def test_one_is_removed_at_the_moment_when_its_load_ends(what: str) -> None:
    new = newcomer("new", loads=[what])
    fleet = distribute(Replica("a"))
    await publish(fleet, 0)
    watch = watched(fleet)
    fleet.add(new)
    await asyncio.sleep(RESTART_S + LOAD_S)
    assert fleet.registry.members["new"].state is ConsumerState.JOINING
    fleet.remove("new", 1.0)
    await asyncio.sleep(10)
    assert (new.working, new.log[-1]) == (False, "new is gone")
    assert not watch.done()
    watch.cancel()


async def test_late_ones_that_finish_while_another_is_removed_stay_in_the_rotation() -> None:
    class SlowlyRemoved(Replica):
        async def leave(self) -> None:
            await asyncio.sleep(5)
            await super().leave()

    late_s = LATE_FACTOR * LOAD_S + LATE_GRACE_S

    slow = SlowlyRemoved("a", loads=["ok", "ok", "100"])
    less_slow = Replica("b", loads=["ok", "ok", f"{late_s + 2}"])
    fleet = distribute(slow, less_slow, Replica("c"), max_concurrent_loads=3, **deadline())
    for version in range(3):
        await publish(fleet, version)
    assert fleet.versions == {"b": 2, "c": 2}


async def test_a_newcomer_and_one_that_is_fenced_can_be_removed() -> None:
    new, bad = newcomer("new"), Replica("bad", loads=["ok", "raise"])

    fleet = distribute(bad, Replica("a"))
    await publish(fleet, 0)
    await publish(fleet, 1)
    fleet.add(new)
    await asyncio.sleep(RESTART_S / 2)
    for name in ("new", "bad"):
        fleet.remove(name, 100.0)
    await asyncio.sleep(1)
    assert [m.name for m in fleet.members] == ["a"]
    await asyncio.sleep(2 * RESTART_S)
    assert not new.working and not bad.working
    assert new.log[-1] == "new is gone" and bad.log[-1] == "bad is gone"


async def test_who_cannot_leave_is_refused() -> None:
    fleet = distribute(Replica("a"), Replica("b"))
    await publish(fleet, 0)
    with pytest.raises(WeightSyncError, match="there is no c; the run has a, b"):
        fleet.remove("c", 1.0)
    fleet.remove("b", 1.0)
    with pytest.raises(WeightSyncError, match="b is leaving already"):
        fleet.remove("b", 1.0)
    with pytest.raises(WeightSyncError, match="a cannot leave: no other replica serves; add one first"):
        fleet.remove("a", 1.0)
    with pytest.raises(WeightSyncError, match="a is SERVING already"):
        fleet.add(newcomer("a"))


async def test_a_newcomer_joins_while_the_weights_are_held_with_the_version_that_is_held() -> None:
    fleet = distribute(Replica("a"))
    await publish(fleet, 3)
    fleet.add(newcomer("new"))
    async with fleet.weights("validation"):
        update = asyncio.create_task(publish(fleet, 4))
        await asyncio.sleep(2 * RESTART_S)
        assert fleet.versions == {"a": 3, "new": 3}
    await update
    assert fleet.versions == {"a": 4, "new": 4}


@pytest.mark.parametrize("loads", [["100"], ["overtaken"], ["ok"]])
async def test_a_load_of_a_newcomer_is_void_if_its_memory_was_overwritten(loads: list[str]) -> None:
    new = newcomer("new", loads=loads)

    fleet = distribute(Replica("a"), **deadline())
    await publish(fleet, 0)
    fleet.add(new)
    await asyncio.sleep(RESTART_S + LOAD_S / 2)
    assert new.log == ["new loads 0"]
    started = now()
    await fleet.retire(0)
    assert now() == started, "it generates nothing, so nothing waits for it"
    await asyncio.sleep(200)
    assert not new.working, "no other version is there"
    await publish(fleet, 1)
    await asyncio.sleep(LOAD_S)
    assert fleet.versions == {"a": 1, "new": 1}


@pytest.mark.parametrize(
    ("load", "waited_s", "fences"),
    [("25", 5.0, 0), ("hang", RETIRE_S, 1)],
)
async def test_memory_is_overwritten_once_no_slow_replica_generates_with_what_it_reads_there(
    load: str, waited_s: float, fences: int
) -> None:
    notes: Notes = []
    slow = Replica("slow", loads=["ok", "ok", load])

    fleet = distribute(slow, Replica("a"), max_concurrent_loads=2, **deadline(**noted(notes)))
    for version in range(3):
        await publish(fleet, version)
    assert fleet.versions == {"a": 2}
    await asyncio.sleep(4)
    started = now()
    await fleet.retire(2)
    assert now() - started == pytest.approx(waited_s)
    assert [event for event, _, _ in notes].count("FENCED") == fences


@pytest.mark.slow
@given(
    first=st.lists(STEPS, min_size=1, max_size=3),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("publish"), st.floats(0, 40, allow_nan=False), STEPS),
            st.tuples(st.just("add"), st.floats(0, 40, allow_nan=False), STEPS),
            st.tuples(st.just("remove"), st.floats(0, 40, allow_nan=False), st.just([])),
            st.tuples(st.just("retire"), st.floats(0, 40, allow_nan=False), st.just([])),
        ),
        max_size=20,
    ),
    picks=st.randoms(use_true_random=False),
)
@settings(max_examples=80)
def test_the_rotation_serves_each_version_whichever_consumers_join_and_leave(
    first: list[list[str]], actions: list[tuple[str, float, list[str]]], picks: Any
) -> None:
    replicas = {
        f"r{i}": Replica(f"r{i}", loads=["ok", *script], prepare_s=3.0) for i, script in enumerate(first)
    }

    async def scenario() -> None:
        fleet = distribute(*replicas.values(), max_concurrent_loads=2)
        watch = watched(fleet)
        await publish(fleet, 0)
        version = 0
        try:
            for action, gap, script in actions:
                if action == "publish":
                    version += 1
                    await publish(fleet, version)
                    for replica in replicas.values():
                        assert not replica.working or replica.version == version
                elif action == "add":
                    name = f"r{len(replicas)}"
                    replicas[name] = newcomer(
                        name, loads=list(script), prepares=script[::-1], prepare_s=3.0, requests=[1, 2]
                    )
                    fleet.add(replicas[name])
                elif action == "retire":
                    await fleet.retire(version - 1)
                else:
                    with suppress(WeightSyncError):
                        fleet.remove(picks.choice(sorted(replicas)), 20.0)
                await asyncio.sleep(gap)
            await asyncio.sleep(1500)
            assert not watch.done()
        except (ProofError, WaitTimeout):
            assert not any(replica.working for replica in replicas.values()), "no replica is left"
            await asyncio.gather(watch, return_exceptions=True)
            return
        states = {member.name: member.state for member in fleet.members}
        assert set(states.values()) <= {ConsumerState.SERVING, ConsumerState.AWAY}
        for name, replica in replicas.items():
            assert replica.working == (states.get(name) is ConsumerState.SERVING)
            assert not replica.working or replica.version == version
        watch.cancel()
        await fleet.close()

    run(scenario)
