# SPDX-License-Identifier: Apache-2.0
"""A keeper finds out that its consumer stopped working, and restarts it; in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.weight_sync.fleet.keeper import (
    ATTEMPTS,
    BACK_OFF_S,
    CHECK_EVERY_S,
    LONGEST_BACK_OFF_S,
)
from tests.fakes.consumers import (
    GRACE_S,
    LOAD_S,
    LOAD_TIMEOUT_S,
    RESTART_S,
    Replica,
    distribute,
    publish,
    watched,
)

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize(("what", "seconds"), [("raise", 0.0), ("hang", LOAD_TIMEOUT_S + GRACE_S)])
async def test_one_that_stops_working_between_publications_is_fenced_and_comes_back(
    what: str, seconds: float
) -> None:
    said: list[str] = []
    replica = Replica("a", checks=["ok", what])

    fleet = distribute(replica, say=said.append)
    watch = watched(fleet)
    await asyncio.sleep(10 * CHECK_EVERY_S)
    assert len(replica.checks) == 2, "no check before the first update"
    await publish(fleet, 0)
    await asyncio.sleep(2 * CHECK_EVERY_S + seconds + 0.1)
    assert list(fleet.fenced) == ["a"]
    await asyncio.sleep(RESTART_S + LOAD_S)
    assert fleet.versions == {"a": 0}, "the newest version again"
    assert not watch.done()
    watch.cancel()
    assert said[0].startswith("a is fenced and restarts; 0 still serve. ")


async def test_repeated_failures_restart_at_growing_intervals() -> None:
    falls: list[float] = []

    def note(event: str, name: str, version: int | None) -> None:
        if event == "FENCED":
            falls.append(asyncio.get_running_loop().time())

    fleet = distribute(Replica("a", checks=["raise"] * 12), note=note)
    watch = watched(fleet)
    await publish(fleet, 0)
    await asyncio.sleep(2000)
    watch.cancel()
    gaps = [b - a for a, b in zip(falls, falls[1:], strict=False)]
    least = RESTART_S + LOAD_S
    assert gaps[0] - least <= CHECK_EVERY_S, "the first time, at once"
    assert BACK_OFF_S <= gaps[1] - least <= BACK_OFF_S + CHECK_EVERY_S
    assert max(gaps) - least == pytest.approx(LONGEST_BACK_OFF_S, abs=CHECK_EVERY_S)


async def test_one_that_does_not_come_back_is_given_up_after_some_attempts() -> None:
    said: list[str] = []

    never = Replica("never", loads=["raise"], restarts=["raise", "hang", "raise"])
    fleet = distribute(never, Replica("good"), say=said.append)
    await publish(fleet, 0)
    await asyncio.sleep(1000)
    assert not never.working
    assert fleet.fenced == {"never": "ProofError: never: other values"}
    assert len((await publish(fleet, 1)).reports) == 1
    assert [line.partition(". ")[0] for line in said[1:]] == [
        f"never did not return (attempt {n} of {ATTEMPTS})" for n in (1, 2, 3)
    ]
    assert "waited 50 s for never to restart" in said[2]


async def test_of_an_error_the_user_gets_the_first_line() -> None:
    class Wordy(Replica):
        async def check(self) -> None:
            raise ConnectionError("the engine died\nin many words", "the engine died")

    fleet = distribute(Wordy("a"))
    watch = watched(fleet)
    await publish(fleet, 0)
    await asyncio.sleep(CHECK_EVERY_S + 0.1)
    assert fleet.fenced == {"a": "ConnectionError: the engine died"}
    watch.cancel()


async def test_a_consumer_that_hangs_delays_no_check_of_another_one() -> None:
    found: dict[str, float] = {}
    hangs, dies = Replica("hangs", checks=["hang"]), Replica("dies")

    loop = asyncio.get_running_loop()

    def note(event: str, name: str, version: int | None) -> None:
        if event == "FENCED":
            found[name] = loop.time()

    fleet = distribute(hangs, dies, note=note, load_timeout_s=600.0)
    watch = watched(fleet)
    await publish(fleet, 0)
    await asyncio.sleep(22 - loop.time())
    dies.checks.append("raise")
    await asyncio.sleep(700)
    watch.cancel()
    assert 22 <= found["dies"] <= 22 + CHECK_EVERY_S
    assert found["hangs"] > 600
