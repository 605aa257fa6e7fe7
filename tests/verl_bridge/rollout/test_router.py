# SPDX-License-Identifier: Apache-2.0
"""The router chooses the least busy replica and keeps the turns of a request together."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.verl_bridge.rollout.router import Router, servers_of

MANY = 10**6
"""A share that no test uses up."""


def router(*names: str, share: int = MANY) -> Router:
    made = Router(share, choose=min)
    made.update({name: name.upper() for name in names})
    return made


def acquired(made: Router, request: str) -> str:
    found = asyncio.run(made.acquire(request))
    assert found is not None
    name, handle = found
    assert handle == name.upper()
    return name


def test_the_least_busy_replica_is_chosen() -> None:
    made = router("a", "b")
    assert [acquired(made, f"r{i}") for i in range(4)] == ["a", "b", "a", "b"]
    made.release("b")
    assert acquired(made, "r9") == "b"


def test_later_turns_use_the_replica_of_the_first() -> None:
    made = router("a", "b")
    assert acquired(made, "x") == "a"
    made.release("a")
    assert [acquired(made, "y"), acquired(made, "x")] == ["a", "a"]


def test_an_empty_router_returns_none() -> None:
    assert asyncio.run(Router(1).acquire("x")) is None
    made = router("a")
    made.remove("a")
    assert asyncio.run(made.acquire("x")) is None
    assert made.servers == ()
    assert not made.full, "nothing waits for a replica here"


def test_a_request_moves_when_its_replica_is_removed() -> None:
    made = router("a", "b")
    assert acquired(made, "x") == "a"
    made.remove("a")
    assert acquired(made, "x") == "b"
    made.update({"a": "A", "b": "B"})
    assert acquired(made, "x") == "b", "and stays there"


@given(st.lists(st.integers(0, 30), max_size=60))
def test_open_turns_are_balanced(requests: list[int]) -> None:
    made = router("a", "b", "c")
    counts = dict.fromkeys("abc", 0)
    for number, _ in enumerate(requests):
        counts[acquired(made, f"r{number}")] += 1
    assert max(counts.values()) - min(counts.values()) <= 1
    for name, count in counts.items():
        for _ in range(count):
            made.release(name)
    assert {acquired(made, f"new {number}") for number in range(3)} == set("abc"), "no turn is open"


# Requests that wait for room.


class Waiting:
    """Requests of one worker; each notes when it gets a replica."""

    def __init__(self, made: Router) -> None:
        self.router, self.placed = made, list[str]()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.due: dict[str, int | None] = {}

    async def begin(self, *requests: str) -> None:
        for request in requests:
            self.tasks[request] = asyncio.create_task(self._acquire(request))
        await settled()

    async def _acquire(self, request: str) -> None:
        place = await self.router.acquire(request, self.due.get(request))
        self.placed.append(f"{request}: {place and place[0]}")

    async def cancel(self, request: str) -> None:
        self.tasks[request].cancel()
        await settled()
        assert self.tasks[request].cancelled()

    async def release(self, *servers: str) -> None:
        for server in servers:
            self.router.release(server)
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_above_the_share_wait_in_the_order_of_their_arrival() -> None:
    some = Waiting(router("a", "b", share=2))
    await some.begin(*(f"r{i}" for i in range(7)))
    assert some.placed == ["r0: a", "r1: b", "r2: a", "r3: b"]
    assert (some.router.waiting, some.router.full) == (3, True)
    await some.release("b", "a")
    assert some.placed[4:] == ["r4: b", "r5: a"]
    await some.release("b")
    assert some.placed[6:] == ["r6: b"]
    assert some.router.waiting == 0


async def test_later_turns_go_before_first_turns() -> None:
    some = Waiting(router("a", share=2))
    await some.begin("talk", "new")
    await some.release("a")
    await some.begin("first", "second", "talk")
    assert some.placed == ["talk: a", "new: a", "first: a"]
    await some.release("a", "a")
    assert some.placed[3:] == ["talk: a", "second: a"]


async def test_what_is_due_first_goes_first() -> None:
    some = Waiting(router("a", share=1))
    await some.begin("open")
    some.due = {"next": 5, "last": 8, "first": 4, "validation": None, "newer": 9}
    await some.begin("next", "last", "first", "validation", "newer")
    await some.release(*"aaaa")
    assert some.placed[1:] == ["first: a", "next: a", "last: a", "validation: a"]


async def test_a_later_turn_goes_to_another_replica_if_its_own_is_full() -> None:
    some = Waiting(router("a", "b", share=1))
    await some.begin("talk")
    await some.release("a")
    await some.begin("other")
    await some.begin("talk")
    assert some.placed == ["talk: a", "other: a", "talk: b"]
    await some.release("a", "b")
    await some.begin("talk")
    assert some.placed[3:] == ["talk: b"], "its prefix is there now"


async def test_waiting_requests_go_to_a_replica_that_joins() -> None:
    some = Waiting(router("a", share=1))
    await some.begin("x", "y", "z")
    some.router.update({"a": "A", "b": "B"})
    await settled()
    assert some.placed == ["x: a", "y: b"]
    some.router.remove("a")
    await settled()
    assert some.router.waiting == 1, "b has no room"
    await some.release("b")
    assert some.placed[2:] == ["z: b"]


async def test_without_a_replica_no_request_waits_for_room() -> None:
    """The caller then waits for a replica, or raises what the last one died of."""

    some = Waiting(router("a", share=1))
    await some.begin("x", "y", "z")
    some.router.remove("a")
    await settled()
    assert some.placed == ["x: a", "y: None", "z: None"]


async def test_a_cancelled_request_leaves_the_queue() -> None:
    some = Waiting(router("a", share=1))
    await some.begin("x", "y", "z")
    await some.cancel("y")
    assert some.router.waiting == 1
    await some.release("a")
    assert some.placed == ["x: a", "z: a"]


async def test_a_request_that_is_cancelled_as_it_gets_room_passes_it_on() -> None:
    some = Waiting(router("a", share=1))
    await some.begin("x", "y", "z")
    some.router.release("a")
    await some.cancel("y")
    assert some.placed == ["x: a", "z: a"]
    await some.release("a")
    await some.begin("last")
    assert some.placed[-1] == "last: a", "its room is free again"


class Random:
    """Drives a router with any order of arrivals, ends, cancellations, deaths and joins."""

    def __init__(self) -> None:
        self.router, self.names = router("a", "b", share=2), ["a", "b"]
        self.tasks: list[asyncio.Task[Any]] = []

    def arrive(self, which: int) -> None:
        self.tasks.append(asyncio.create_task(self.router.acquire(f"r{which}")))

    def end(self, which: int) -> None:
        running = [task for task in self.tasks if task.done()]
        if running:
            task = running[which % len(running)]
            self.tasks.remove(task)
            if task.result() is not None:
                self.router.release(task.result()[0])

    def cancel(self, which: int) -> None:
        waiting = [task for task in self.tasks if not task.done()]
        if waiting:
            task = waiting[which % len(waiting)]
            self.tasks.remove(task)
            task.cancel()

    def die(self, which: int) -> None:
        self.router.remove("abc"[which % 3])
        self.names = list(self.router.servers)

    def join(self, which: int) -> None:
        self.names = sorted({*self.names, "abc"[which % 3]})
        self.router.update({name: name.upper() for name in self.names})

    def check(self) -> None:
        running = Counter(task.result()[0] for task in self.tasks if task.done() and task.result())
        counts = [running[name] for name in self.names]
        assert max(counts, default=0) <= 2
        assert self.router.waiting == sum(not task.done() for task in self.tasks)
        assert not self.router.waiting or min(counts, default=0) == 2, (
            "a request waits although there is room"
        )


ACTIONS = (Random.arrive, Random.arrive, Random.end, Random.cancel, Random.die, Random.join)


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 12)), max_size=80))
def test_no_request_waits_while_there_is_room(steps: list[tuple[Any, int]]) -> None:
    async def story() -> None:
        some = Random()
        for action, which in steps:
            action(some, which)
            await settled()
            some.check()
        while some.tasks:
            (some.end if any(task.done() for task in some.tasks) else some.cancel)(0)
            await settled()
        assert some.router.waiting == 0
        every = [asyncio.create_task(some.router.acquire(f"n{i}")) for i in range(2 * len(some.names))]
        await settled()
        places = [place[0] for task in every if task.done() and (place := task.result())]
        assert sorted(places) == sorted(2 * some.names), "no room is lost"
        for task in every:
            task.cancel()

    asyncio.run(story())


def test_only_verls_default_balancer_lets_clients_decide() -> None:
    class GlobalRequestLoadBalancer(SimpleNamespace):
        pass

    known: dict[str, Any] = {"a": 1}
    assert servers_of(GlobalRequestLoadBalancer(_full_determinism=False, _servers=known)) == known
    assert servers_of(GlobalRequestLoadBalancer(_full_determinism=True, _servers=known)) is None
    assert servers_of(SimpleNamespace(_full_determinism=False, _servers=known)) is None
