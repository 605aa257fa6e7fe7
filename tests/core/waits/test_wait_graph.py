# SPDX-License-Identifier: Apache-2.0
"""The waits of a loop, and who of them can never end."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.core.waits.deadline import within
from recipe.async_pipeline.core.waits.wait_graph import Holders, Wait, cycle_in, deadlocked, waits_of
from recipe.async_pipeline.errors import WaitTimeout

pytestmark = pytest.mark.virtual_time

GRAPHS = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdefg"), max_size=3))


async def test_a_wait_is_known_while_it_lasts() -> None:
    waits = waits_of()
    task = asyncio.create_task(
        within(asyncio.sleep(2), 5, owner="train", what="the gather", holder=lambda: "no holder")
    )
    await asyncio.sleep(1)
    (wait,) = waits.open
    assert (wait.owner, wait.what, wait.since, wait.timeout_s) == ("train", "the gather", 0.0, 5)
    assert wait.holders() == "no holder"
    assert wait.holders().names == ()
    await task
    assert waits.open == ()


@pytest.mark.parametrize("ending", ["cancelled", "raises", "expires"])
async def test_however_it_ends_it_is_forgotten(ending: str) -> None:
    async def broken() -> None:
        raise ValueError(ending)

    inner = broken() if ending == "raises" else asyncio.sleep(100)
    task = asyncio.create_task(within(inner, None if ending == "cancelled" else 3, owner="a", what="b"))
    await asyncio.sleep(0)
    if ending == "cancelled":
        task.cancel()
    with pytest.raises((ValueError, WaitTimeout, asyncio.CancelledError)):
        await task
    assert waits_of().open == ()


async def test_an_expiry_is_reported_while_the_wait_is_still_there() -> None:
    seen: list[tuple[str, int]] = []

    waits = waits_of()

    def record(wait: Wait) -> str:
        seen.append((wait.owner, len(waits.open)))
        return ""

    waits.on_expiry = record
    other = asyncio.create_task(within(asyncio.sleep(9), 10, owner="other", what="sleep"))
    with pytest.raises(WaitTimeout):
        await within(asyncio.sleep(9), 2, owner="train", what="sleep")
    other.cancel()
    assert seen == [("train", 2)]


def test_each_loop_has_separate_waits() -> None:
    async def main() -> object:
        return waits_of()

    assert run_virtual(main()) is not run_virtual(main())


def test_holders_without_names_lead_nowhere() -> None:
    wait = Wait(owner="a", what="b", since=0.0, timeout_s=1.0)
    assert wait.holders() == ""
    assert Holders("held by x", ["x"]).names == ("x",)


def test_a_ring_is_a_deadlock_and_who_waits_for_it_is_stuck_too() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"], "e": ["f"]}
    assert deadlocked(graph) == {"a", "b", "c", "d"}
    assert cycle_in(graph) == ["a", "b", "c"]


def test_one_holder_that_may_continue_is_enough() -> None:
    assert deadlocked({"a": ["b", "train"], "b": ["a"]}) == set()
    assert deadlocked({"a": ["b"], "b": []}) == set(), "b waits for something outside"


@given(GRAPHS)
def test_no_stuck_owner_has_a_way_out(graph: dict[str, list[str]]) -> None:
    stuck = deadlocked(graph)
    assert all(graph[name] and stuck.issuperset(graph[name]) for name in stuck)
    # And every other owner has: along some path to one that does not wait, or whose wait names no holder.
    for name in graph.keys() - stuck:
        reached, queue = {name}, [name]
        while queue:
            fresh = set(graph.get(queue.pop(), ())) - reached
            reached |= fresh
            queue += fresh
        assert any(not graph.get(one) for one in reached)
    cycle = cycle_in(graph)
    assert bool(cycle) == bool(stuck)
    for name, following in zip(cycle, [*cycle[1:], *cycle[:1]], strict=True):
        assert following in graph[name]
