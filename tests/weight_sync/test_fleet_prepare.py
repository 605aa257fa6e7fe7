# SPDX-License-Identifier: Apache-2.0
"""All consumers prepare a version at once and take turns to commit it, whatever happens in between."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

import pytest

from recipe.async_pipeline.config.knobs.weight_sync import SHORT_COMMIT_S, concurrent_loads
from recipe.async_pipeline.core.groups.items import LoadReport
from recipe.async_pipeline.errors import ProofError, WaitTimeout
from recipe.async_pipeline.weight_sync.fleet.fleet import Fleet
from recipe.async_pipeline.weight_sync.fleet.keeper import CHECK_EVERY_S
from recipe.async_pipeline.weight_sync.fleet.registry import (
    LATE_FACTOR,
    LATE_GRACE_S,
    ConsumerState,
    LoadPhase,
)
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket
from tests.fakes.consumers import (
    GRACE_S,
    LOAD_S,
    LOAD_TIMEOUT_S,
    RESTART_S,
    Replica,
    distribute,
    newcomer,
    publish,
    watched,
)

pytestmark = pytest.mark.virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(("turns", "seconds"), [(1, 6.5 + 8 * 3.0), (2, 6.5 + 4 * 3.0), (8, 6.5 + 3.0)])
async def test_eight_consumers_prepare_at_once_and_take_turns_to_commit(turns: int, seconds: float) -> None:
    replicas = [Replica(f"r{i}", prepare_s=6.5, load_s=3.0) for i in range(8)]
    fleet = distribute(*replicas, max_concurrent_loads=turns, load_timeout_s=600.0)
    for version in range(3):
        started = now()
        assert len((await publish(fleet, version)).reports) == 8
        assert now() - started == pytest.approx(seconds)


async def test_short_commits_take_no_turns_once_they_are_known() -> None:
    replicas = [Replica(f"r{i}", prepare_s=1.0, load_s=SHORT_COMMIT_S) for i in range(8)]
    replicas[0].loads = ["ok", "ok", "ok", "2"]
    fleet = Fleet(
        replicas,
        lambda line: None,
        load_timeout_s=60.0,
        restart_timeout_s=60.0,
        max_concurrent_loads=partial(concurrent_loads, None),
    )
    taken = []
    for version in range(6):
        started = now()
        await publish(fleet, version)
        taken.append(now() - started)
    assert taken == pytest.approx([3.0, 1.5, 1.25, 3.0, 1.5, 1.25])


async def test_only_a_commit_takes_a_turn() -> None:
    log: list[str] = []

    slow, fast = Replica("slow", log=log, prepare_s=5.0), Replica("fast", log=log, prepare_s=1.0)
    await publish(distribute(slow, fast), 0)
    assert log == [
        "slow prepares 0",
        "fast prepares 0",
        "fast loads 0",
        "fast serves 0",
        "slow loads 0",
        "slow serves 0",
    ]


@pytest.mark.parametrize(("what", "seconds"), [("raise", 0.0), ("hang", LOAD_TIMEOUT_S + GRACE_S)])
async def test_one_that_cannot_prepare_is_fenced_and_the_others_do_not_wait(
    what: str, seconds: float
) -> None:
    bad, good = Replica("bad", prepares=["ok", what]), Replica("good")

    fleet = distribute(bad, good)
    await publish(fleet, 0)
    started = now()
    outcome = await publish(fleet, 1)
    assert (len(outcome.reports), list(outcome.failures)) == (1, ["bad"])
    assert now() - started == max(seconds, LOAD_S), "a commit runs while the other one prepares"
    assert (what == "hang") == ("waited 11 s for bad to prepare version 1" in outcome.failures["bad"])
    await asyncio.sleep(RESTART_S + LOAD_S + 0.1)
    assert fleet.versions == {"bad": 1, "good": 1}


async def test_one_that_dies_between_preparation_and_commit_hands_its_turn_on() -> None:
    log: list[str] = []
    dies = Replica("dies", log=log, checks=["ok", "raise"])
    others = [Replica(name, log=log, load_s=9.0) for name in ("a", "c")]

    fleet = distribute(others[0], dies, others[1])
    watch = watched(fleet)
    await publish(fleet, 0)
    dies.checks = ["raise"]
    log.clear()
    update = asyncio.create_task(publish(fleet, 1))
    await asyncio.sleep(0.1)
    assert fleet.registry.members["dies"].phase is LoadPhase.PREPARED
    assert list((await update).failures) == ["dies"]
    assert log == ["a loads 1", "a serves 1", "c loads 1", "c serves 1"]
    await asyncio.sleep(RESTART_S + 2 * CHECK_EVERY_S + LOAD_S)
    assert fleet.versions == {"a": 1, "c": 1, "dies": 1}
    watch.cancel()


async def test_a_newcomer_drops_what_it_prepares_for_a_newer_version() -> None:
    new = newcomer("new", prepares=["30"], prepare_s=5.0)

    fleet = distribute(Replica("a"), load_timeout_s=600.0)
    await publish(fleet, 0)
    fleet.add(new)
    await asyncio.sleep(RESTART_S + 1)
    assert new.log == ["new prepares 0"]
    started = now()
    await publish(fleet, 1)
    assert now() - started == LOAD_S, "it throttles no other"
    await asyncio.sleep(started + 5.0 + LOAD_S + 0.1 - now())
    assert fleet.versions == {"a": 1, "new": 1}, "without the rest of the old preparation"
    assert new.log == ["new prepares 0", "new prepares 1", "new loads 1", "new serves 1"]


async def test_one_that_is_too_slow_to_prepare_catches_up_with_a_newer_version() -> None:
    slow = Replica("slow", prepares=["ok", "ok", "500"], prepare_s=1.0)
    late_s = LATE_FACTOR * (1.0 + LOAD_S) + LATE_GRACE_S

    fleet = distribute(slow, Replica("a", prepare_s=1.0), load_timeout_s=600.0)
    await publish(fleet, 0)
    await publish(fleet, 1)
    started = now()
    await publish(fleet, 2)
    assert now() - started == late_s
    assert fleet.registry.members["slow"].state is ConsumerState.BEHIND
    assert (slow.working, slow.version) == (False, 1)
    await publish(fleet, 3)
    await asyncio.sleep(0.1)
    assert fleet.versions == {"slow": 3, "a": 3}
    assert "slow loads 2" not in slow.log


@pytest.mark.parametrize("script", [["hang"], ["8"], ["raise"]])
async def test_memory_is_overwritten_while_a_consumer_only_prepares_from_it(script: list[str]) -> None:
    new = newcomer("new", prepares=list(script), prepare_s=5.0)

    fleet = distribute(Replica("a"), load_timeout_s=600.0)
    await publish(fleet, 0)
    fleet.add(new)
    await asyncio.sleep(RESTART_S + 1)
    started = now()
    await fleet.retire(0)
    assert now() == started, "what it prepares is never served"
    await asyncio.sleep(50)
    assert new.version is None and fleet.fenced == {}
    await publish(fleet, 1)
    await asyncio.sleep(10 + LOAD_S)
    assert fleet.versions == {"a": 1, "new": 1}


class Checked(Replica):
    """Also checks that no commit begins with memory that will be overwritten."""

    fleet: Fleet | None = None
    commits = 0
    most_commits = 0

    async def commit(self, version: int) -> LoadReport:
        assert self.fleet is not None
        assert version > self.fleet.registry.retired, "its memory may change during the commit"
        serving = self.working
        Checked.commits += serving
        Checked.most_commits = max(Checked.most_commits, Checked.commits)
        try:
            return await super().commit(version)
        finally:
            Checked.commits -= serving


OUTCOMES = ["ok", "raise", "hang", "8"]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("prepare", "commit"), list(itertools.product(OUTCOMES, OUTCOMES)))
@pytest.mark.parametrize("gap_s", [0.0, 1.0, 3.0, 9.0, 20.0])
async def test_after_any_prepare_and_any_commit_the_newest_version_is_served(
    prepare: str, commit: str, gap_s: float, joins: bool
) -> None:
    """Every combination of ends, at updates that overtake each part of a load."""
    Checked.commits = Checked.most_commits = 0
    script: dict[str, Any] = {"prepare_s": 2.0}
    odd = (
        Checked("odd", working=False, prepares=[prepare], loads=[commit], **script)
        if joins
        else Checked("odd", prepares=["ok", prepare], loads=["ok", commit], **script)
    )
    others = [Checked(name, prepare_s=2.0) for name in "ab"]

    fleet = distribute(*others, *([] if joins else [odd]))
    for replica in (*others, odd):
        replica.fleet = fleet
    watch = watched(fleet)
    await publish(fleet, 0)
    if joins:
        fleet.add(odd)
        await asyncio.sleep(RESTART_S)
    for version in range(1, 6):
        started = now()
        await publish(fleet, version)
        bound = LOAD_TIMEOUT_S + GRACE_S
        assert now() - started <= 2 * bound + 3 * LOAD_S, "each part of a load has a deadline"
        assert all(one.version == version for one in (*others, odd) if one.working)
        await asyncio.sleep(gap_s)
        await fleet.retire(version - 1)
    await asyncio.sleep(300)
    assert Checked.most_commits == 1
    fails = joins and {prepare, commit} & {"raise", "hang"}
    if not fails:
        assert fleet.versions == {"a": 5, "b": 5, "odd": 5}
    elif "odd" not in fleet.versions:
        assert odd.log[-1] == "odd is gone", "it has never worked"
    assert not watch.done()
    watch.cancel()


async def test_a_commit_that_hangs_at_the_first_version_ends_the_run_with_its_name() -> None:
    with pytest.raises(WaitTimeout, match="waited 11 s for a to load version 0; a does not respond"):
        await publish(distribute(Replica("a", loads=["hang"])), 0)
    with pytest.raises(WaitTimeout, match="waited 11 s for a to prepare version 0; a does not respond"):
        await publish(distribute(Replica("a", prepares=["hang"])), 0)
    with pytest.raises(ProofError, match="a: other values"):
        await publish(distribute(Replica("a", prepares=["raise"])), 0)


async def test_a_wait_names_what_each_consumer_does() -> None:
    fleet = distribute(Replica("a", prepare_s=1.0), Replica("b", prepare_s=1.0), Replica("c", prepare_s=5.0))
    update = asyncio.create_task(
        fleet.publish(WeightTicket(version=7, board="b", pid=1, num_bytes=8, gather_s=0.1))
    )
    await asyncio.sleep(2)
    assert fleet.hold_ups() == (
        "a loads version 7; b waits for its turn to load version 7; c prepares version 7"
    )
    await update
