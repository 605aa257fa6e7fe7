# SPDX-License-Identifier: Apache-2.0
"""Consumers that fail, hang and come back, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import LoadReport
from recipe.async_pipeline.errors import ProofError, WaitTimeout, WeightSyncError
from recipe.async_pipeline.weight_sync.manifest import Ticket
from recipe.async_pipeline.weight_sync.publisher import (
    ATTEMPTS,
    BACK_OFF_S,
    CHECK_EVERY_S,
    LONGEST_BACK_OFF_S,
    Distribution,
    Outcome,
)

LOAD_TIMEOUT_S, RESTART_TIMEOUT_S, GRACE_S = 10.0, 50.0, 1.0
LOAD_S, RESTART_S = 2.0, 20.0
FOREVER_S = 1e9


@dataclass
class Replica:
    """Does what its script says, call after call: `ok`, `raise` or `hang`; then all is well."""

    name: str
    log: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    version: int | None = None
    checks: list[str] = field(default_factory=list)
    working: bool = True
    failed: bool = False

    async def load(self, ticket: Ticket) -> LoadReport:
        version = ticket.version
        assert not self.failed, "a replica that failed a load restarts before the next load"
        assert self.version is None or version > self.version, "never back"
        self.log.append(f"{self.name} loads {version}")
        self.failed = True
        await self._follow(self.loads, LOAD_S)
        self.failed = False
        self.version = version
        self.log.append(f"{self.name} serves {version}")
        return LoadReport(transfer_s=0.1, load_s=LOAD_S, stall_s=LOAD_S, prove_s=0.01, tensors_proved=3)

    async def leave(self) -> None:
        self.working = False

    async def restart(self) -> None:
        assert not self.working
        self.version = None
        await self._follow(self.restarts, RESTART_S)
        self.failed = False

    async def join(self) -> None:
        assert self.version is not None
        self.working = True

    async def check(self) -> None:
        assert self.working
        await self._follow(self.checks, 0.0)

    async def _follow(self, script: list[str], seconds: float) -> None:
        step = script.pop(0) if script else "ok"
        await asyncio.sleep(FOREVER_S if step == "hang" else seconds)
        if step == "raise":
            raise ProofError(f"{self.name}: other values")


def distribute(
    *replicas: Replica, say: Callable[[str], None] = lambda line: None, **more: Any
) -> Distribution:
    return Distribution(
        replicas,
        say,
        load_timeout_s=LOAD_TIMEOUT_S,
        restart_timeout_s=RESTART_TIMEOUT_S,
        grace_s=GRACE_S,
        **more,
    )


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


def test_who_serves_what_is_known() -> None:
    a, b = Replica("a"), Replica("b", loads=["ok", "raise"])

    async def scenario() -> None:
        distribution = distribute(a, b)
        await publish(distribution, 1)
        assert distribution.versions == {"a": 1, "b": 1}
        await publish(distribution, 2)
        assert distribution.versions == {"a": 2}, "b is fenced"
        await asyncio.sleep(2 * RESTART_S)
        assert distribution.versions == {"a": 2, "b": 2}
        await distribution.close()

    run(scenario)


def publish(distribution: Distribution, version: int) -> Coroutine[Any, Any, Outcome]:
    return distribution.publish(Ticket(version=version, board="b", pid=1, num_bytes=8, gather_s=0.1))


def test_consumers_load_one_after_another() -> None:
    log: list[str] = []

    async def scenario() -> None:
        outcome = await publish(distribute(Replica("a", log), Replica("b", log)), 0)
        assert len(outcome.reports) == 2
        assert outcome.failures == {}

    run(scenario)
    assert log == ["a loads 0", "a serves 0", "b loads 0", "b serves 0"], "never all at once"


@pytest.mark.parametrize(
    ("max_concurrent_loads", "seconds"), [(1, 5 * LOAD_S), (2, 3 * LOAD_S), (5, LOAD_S), (9, LOAD_S)]
)
def test_so_many_load_at_the_same_time(max_concurrent_loads: int, seconds: float) -> None:
    log: list[str] = []

    async def scenario() -> None:
        replicas = [Replica(str(i), log) for i in range(5)]
        assert (
            len((await publish(distribute(*replicas, max_concurrent_loads=max_concurrent_loads), 0)).reports)
            == 5
        )
        assert asyncio.get_running_loop().time() == seconds

    run(scenario)
    loading, most = 0, 0
    for line in log:
        loading += 1 if " loads " in line else -1
        most = max(most, loading)
    assert most == min(max_concurrent_loads, 5)


@pytest.mark.parametrize(("what", "seconds"), [("raise", LOAD_S), ("hang", LOAD_TIMEOUT_S + GRACE_S)])
def test_one_that_fails_is_fenced_and_comes_back_at_the_current_version(what: str, seconds: float) -> None:
    log: list[str] = []
    said: list[str] = []
    bad, good = Replica("bad", log, loads=["ok", what]), Replica("good", log)

    async def scenario() -> None:
        distribution = distribute(bad, good, say=said.append)
        loop = asyncio.get_running_loop()
        await publish(distribution, 0)
        started = loop.time()
        outcome = await publish(distribution, 1)
        assert len(outcome.reports) == 1
        assert outcome.failures == distribution.fenced
        assert loop.time() - started == seconds + LOAD_S, "the update does not wait for the restart"
        assert (bad.working, good.version) == (False, 1)
        assert list(distribution.fenced) == ["bad"]
        assert (await publish(distribution, 2)).failures == {}, (
            "the failure of the update before is not repeated"
        )
        await asyncio.sleep(RESTART_S + LOAD_S)
        assert (bad.working, bad.version, distribution.fenced) == (True, 2, {})
        await publish(distribution, 3)
        assert bad.version == 3

    run(scenario)
    assert "bad loads 1" in log and log.count("bad loads 2") == 1
    assert said[0].startswith("bad is fenced and restarts; 1 still serve. ")
    assert said[1] == "bad serves again, version 2"


def test_at_the_first_publication_the_last_one_that_fails_ends_it() -> None:
    """Nothing has ever worked, so a restart is no remedy."""

    async def scenario() -> None:
        distribution = distribute(Replica("a", loads=["raise"]), Replica("b", loads=["hang"]))
        with pytest.raises(WaitTimeout, match="waited 11 s for b to load version 0; b does not respond"):
            await publish(distribution, 0)
        async with distribution.weights("another task"):
            pass
        await distribution.close()

    run(scenario)


def test_an_update_without_consumers_waits_for_the_first_to_return() -> None:
    notes: list[tuple[str, str, int | None]] = []
    a, b = Replica("a", loads=["ok", "raise"], restarts=["raise"]), Replica("b", loads=["ok", "raise"])

    async def scenario() -> None:
        distribution = distribute(a, b, note=lambda *what: notes.append(what))
        loop = asyncio.get_running_loop()
        await publish(distribution, 0)
        started = loop.time()
        assert len((await publish(distribution, 1)).reports) == 1
        assert loop.time() - started == 3 * LOAD_S + RESTART_S, "b's; a needs a second attempt"
        assert distribution.versions == {"b": 1}
        assert len((await publish(distribution, 2)).reports) == 1
        await asyncio.sleep(2 * RESTART_S)
        assert distribution.versions == {"a": 2, "b": 2}

    run(scenario)
    assert notes == [
        ("FENCED", "a", None),
        ("FENCED", "b", None),
        ("ABSENT", "a", None),
        ("REJOINED", "b", 1),
        ("REJOINED", "a", 2),
    ]


def test_an_update_raises_the_last_error_if_no_consumer_returns() -> None:
    async def scenario() -> None:
        distribution = distribute(Replica("a", loads=["ok", "raise"], restarts=["raise"] * ATTEMPTS))
        await publish(distribution, 0)
        with pytest.raises(ProofError, match="a: other values"):
            await publish(distribution, 1)

    run(scenario)


def watched(distribution: Distribution) -> asyncio.Task[None]:
    return asyncio.create_task(distribution.watch())


@pytest.mark.parametrize(("what", "seconds"), [("raise", 0.0), ("hang", LOAD_TIMEOUT_S + GRACE_S)])
def test_one_that_stops_working_between_publications_is_fenced_and_comes_back(
    what: str, seconds: float
) -> None:
    said: list[str] = []
    replica = Replica("a", checks=["ok", what])

    async def scenario() -> None:
        distribution = distribute(replica, say=said.append)
        watch = watched(distribution)
        await asyncio.sleep(10 * CHECK_EVERY_S)
        assert len(replica.checks) == 2, "no check before the first update"
        await publish(distribution, 0)
        await asyncio.sleep(2 * CHECK_EVERY_S + seconds + 0.1)
        assert list(distribution.fenced) == ["a"]
        await asyncio.sleep(RESTART_S + LOAD_S)
        assert distribution.versions == {"a": 0}, "the newest version again"
        assert not watch.done()
        watch.cancel()

    run(scenario)
    assert said[0].startswith("a is fenced and restarts; 0 still serve. ")


def test_watch_raises_if_no_consumer_returns() -> None:
    async def scenario() -> None:
        distribution = distribute(Replica("a", checks=["raise"], restarts=["raise"] * ATTEMPTS))
        watch = watched(distribution)
        await publish(distribution, 0)
        with pytest.raises(ProofError, match="a: other values"):
            await watch

    run(scenario)


def test_repeated_failures_restart_at_growing_intervals() -> None:
    falls: list[float] = []

    async def scenario() -> None:
        def note(event: str, name: str, version: int | None) -> None:
            if event == "FENCED":
                falls.append(asyncio.get_running_loop().time())

        distribution = distribute(Replica("a", checks=["raise"] * 12), note=note)
        watch = watched(distribution)
        await publish(distribution, 0)
        await asyncio.sleep(2000)
        watch.cancel()

    run(scenario)
    gaps = [b - a for a, b in zip(falls, falls[1:], strict=False)]
    least = RESTART_S + LOAD_S
    assert gaps[0] - least <= CHECK_EVERY_S, "the first time, at once"
    assert BACK_OFF_S <= gaps[1] - least <= BACK_OFF_S + CHECK_EVERY_S
    assert max(gaps) - least == pytest.approx(LONGEST_BACK_OFF_S, abs=CHECK_EVERY_S)


def test_one_that_does_not_come_back_is_given_up_after_some_attempts() -> None:
    said: list[str] = []

    async def scenario() -> None:
        never = Replica("never", loads=["raise"], restarts=["raise", "hang", "raise"])
        distribution = distribute(never, Replica("good"), say=said.append)
        await publish(distribution, 0)
        await asyncio.sleep(1000)
        assert not never.working
        assert distribution.fenced == {"never": "ProofError: never: other values"}
        assert len((await publish(distribution, 1)).reports) == 1

    run(scenario)
    assert [line.partition(". ")[0] for line in said[1:]] == [
        f"never did not return (attempt {n} of {ATTEMPTS})" for n in (1, 2, 3)
    ]
    assert "waited 50 s for never to restart" in said[2]


def test_a_version_that_is_not_newer_is_refused() -> None:
    async def scenario() -> None:
        distribution = distribute(Replica("a"))
        await publish(distribution, 3)
        with pytest.raises(WeightSyncError, match="v3 offered after v3"):
            await publish(distribution, 3)

    run(scenario)


def test_a_task_can_hold_the_weights() -> None:
    async def scenario() -> None:
        replica = Replica("a")
        distribution = distribute(replica)
        async with distribution.weights("validation"):
            task = asyncio.create_task(publish(distribution, 0))
            await asyncio.sleep(100)
            assert replica.version is None
        await task
        assert replica.version == 0

    run(scenario)


def test_the_wait_for_held_weights_has_a_deadline() -> None:
    async def scenario() -> None:
        distribution = Distribution(
            [Replica("a")], lambda line: None, load_timeout_s=10, restart_timeout_s=50, wait_timeout_s=300
        )
        async with distribution.weights("validation"):
            with pytest.raises(
                WaitTimeout,
                match="param_update waited 300 s for the replicas' weights; validation has them",
            ):
                await publish(distribution, 0)
        assert len((await publish(distribution, 0)).reports) == 1, (
            "and nothing is held by the one that gave up"
        )

    run(scenario)


def test_of_an_error_the_user_gets_the_first_line() -> None:
    class Wordy(Replica):
        async def check(self) -> None:
            raise ConnectionError("the engine died\nin many words", "the engine died")

    async def scenario() -> None:
        distribution = distribute(Wordy("a"))
        watch = watched(distribution)
        await publish(distribution, 0)
        await asyncio.sleep(CHECK_EVERY_S + 0.1)
        assert distribution.fenced == {"a": "ConnectionError: the engine died"}
        watch.cancel()

    run(scenario)


def test_a_balancer_that_does_not_answer_ends_it() -> None:
    class Deaf(Replica):
        async def leave(self) -> None:
            await asyncio.sleep(1e6)

    async def scenario() -> None:
        distribution = distribute(Deaf("a", loads=["raise"]), Replica("b"))
        with pytest.raises(WaitTimeout, match="param_update waited 60 s for the balancer to remove a"):
            await publish(distribution, 0)

    run(scenario)


STEPS = st.lists(st.sampled_from(["ok", "ok", "raise", "hang"]), max_size=8)
RESTARTS = st.lists(st.sampled_from(["ok", "ok", "raise", "hang"]), max_size=4)


@pytest.mark.slow
@given(
    scripts=st.lists(st.tuples(STEPS, RESTARTS, STEPS), min_size=1, max_size=3),
    gaps=st.lists(st.floats(0, 60, allow_nan=False), min_size=1, max_size=12),
    max_concurrent_loads=st.integers(1, 3),
)
@settings(max_examples=60)
def test_after_any_failure_serving_consumers_are_current_and_others_return(
    scripts: list[tuple[list[str], list[str], list[str]]], gaps: list[float], max_concurrent_loads: int
) -> None:
    replicas = [
        Replica(f"r{i}", loads=["ok", *a], restarts=list(b), checks=list(c))
        for i, (a, b, c) in enumerate(scripts)
    ]

    async def scenario() -> None:
        distribution = distribute(*replicas, max_concurrent_loads=max_concurrent_loads)
        watch = watched(distribution)
        try:
            for version, gap in enumerate(gaps):
                assert (await publish(distribution, version)).reports
                for replica in replicas:
                    assert (
                        (replica in distribution.serving)
                        == replica.working
                        == (replica.name not in distribution.fenced)
                    )
                    if replica.working:
                        assert replica.version == version
                await asyncio.sleep(gap)
            await asyncio.sleep(1500)
        except (ProofError, WaitTimeout):
            assert all(not replica.working for replica in replicas), "no replica is left"
            return
        for replica in replicas:
            if not replica.working:
                assert replica.name in distribution.fenced, "its fate is recorded"
            else:
                assert replica.version == len(gaps) - 1
        watch.cancel()
        await distribution.close()

    run(scenario)
