# SPDX-License-Identifier: Apache-2.0
"""A stage that works on everything at once: its states, its lease, its order, its back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.channel import Channel
from recipe.async_pipeline.core.concurrent_stage import ConcurrentStage
from recipe.async_pipeline.core.flow import AsyncTrainingFlow
from recipe.async_pipeline.core.pools import DevicePool
from recipe.async_pipeline.core.replay import busy_intervals
from recipe.async_pipeline.core.stage import ROLES, create_role_state_machine, register_role
from recipe.async_pipeline.core.state_machine import Event, StageState
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import WaitTimeout
from recipe.async_pipeline.lab.event_audit import EventAudit
from tests.fakes.trainer import SimTrainer


@dataclass(frozen=True)
class Job:
    """Work of some seconds; a negative duration yields no output."""

    uid: str
    seconds: float
    step: int = 1


@dataclass(frozen=True)
class Jobs:
    parts: Sequence[Job]
    step: int = 1


class Worker(ConcurrentStage):
    async def process(self, item: Job) -> None:
        await asyncio.sleep(abs(item.seconds))
        self.note("SEEN")
        if item.seconds >= 0:
            await self.emit(item)

    def split(self, item: Jobs) -> Iterable[Job]:
        return item.parts


@pytest.fixture(autouse=True, scope="module")
def worker() -> Iterator[None]:
    register_role("worker")(Worker)
    yield
    del ROLES["worker"]


def make(room: int = 64) -> Worker:
    trainer = SimTrainer()
    machine = create_role_state_machine("worker", AsyncTrainingFlow(trainer), trainer)
    assert isinstance(machine, Worker)
    machine.inputs, machine.outputs = (Channel("in", 64),), (Channel("out", room),)
    machine.pool = DevicePool("train", 1)
    machine.pipeline.machines.append(machine)
    return machine


async def feed(machine: Worker, items: Iterable[tuple[float, Sequence[float]]]) -> None:
    """Send jobs of these durations at these times."""
    loop = asyncio.get_running_loop()
    for number, (at, seconds) in enumerate(items):
        await asyncio.sleep(at - loop.time())
        jobs = [Job(f"{number}.{i}", each) for i, each in enumerate(seconds)]
        await machine.inputs[0].send(Jobs(jobs))
    machine.inputs[0].close()


def run(machine: Worker, items: Sequence[tuple[float, Sequence[float]]], each_s: float = 0.0) -> list[Any]:
    """Run to the end; the consumer takes `each_s` for each output. Returns outputs with their times."""
    received = []

    async def consume() -> None:
        async for job in machine.outputs[0]:
            received.append((job.uid, asyncio.get_running_loop().time()))
            await asyncio.sleep(each_s)

    async def main() -> None:
        await asyncio.gather(machine.run(), feed(machine, items), consume())

    run_virtual(main())
    return received


def events(machine: Worker) -> list[tuple[float, str]]:
    return [(r.t, r.event) for r in machine.pipeline.log.records if r.event in Event.__members__]


def test_a_part_that_comes_later_does_not_wait_for_a_slow_one() -> None:
    machine = make()
    assert run(machine, [(0.0, [9.0, 1.0]), (2.0, [1.0])]) == [("0.1", 1.0), ("1.0", 3.0), ("0.0", 9.0)]
    assert events(machine) == [
        (0.0, "START"),
        (0.0, "ITEM"),
        (0.0, "LEASE"),
        (1.0, "OUTPUT"),
        (1.0, "RESUME"),
        (3.0, "OUTPUT"),
        (3.0, "RESUME"),
        (9.0, "OUTPUT"),
        (9.0, "FINISH"),
        (9.0, "END_OF_INPUT"),
    ]


def test_it_runs_while_a_part_is_worked_on_and_waits_for_room_when_none_is() -> None:
    """Each output takes the consumer 4 seconds, and only one fits into the channel."""
    machine = make(room=1)
    received = run(machine, [(0.0, [1.0, 1.1, 1.2, 1.3, 5.0]), (12.0, [1.0])], each_s=4.0)
    assert [uid for uid, _ in received] == ["0.0", "0.1", "0.2", "0.3", "0.4", "1.0"]
    assert busy_intervals(machine.pipeline.log.records, "worker") == [(0.0, 5.0), (12.0, 13.0)]
    blocked = [r.t for r in machine.pipeline.log.records if r.state == "WAITING_OUTPUT"]
    assert blocked[-1] == 17.0, "the lease is held until all is handed on"
    assert machine.pool is not None and machine.pool.holders == ()


def test_a_part_without_output_may_be_the_last_one() -> None:
    machine = make()
    assert run(machine, [(0.0, [1.0, -2.0]), (5.0, [-1.0])]) == [("0.0", 1.0)]
    assert events(machine)[-3:] == [(5.0, "LEASE"), (6.0, "FINISH"), (6.0, "END_OF_INPUT")]


def test_a_part_without_output_may_end_while_others_wait_for_room() -> None:
    machine = make(room=1)
    run(machine, [(0.0, [1.0, 1.0, 1.0, -2.0])], each_s=5.0)
    assert busy_intervals(machine.pipeline.log.records, "worker") == [(0.0, 2.0)]


def test_an_item_without_parts_leaves_it_idle() -> None:
    machine = make()
    assert run(machine, [(0.0, []), (1.0, [1.0])]) == [("1.0", 2.0)]


def test_notes_name_the_part_whose_task_makes_them() -> None:
    machine = make()
    run(machine, [(0.0, [2.0, 1.0])])
    seen = [dict(r.fields) for r in machine.pipeline.log.records if r.event == "SEEN"]
    assert seen == [{"step": 1, "key": "0.1"}, {"step": 1, "key": "0.0"}]


def test_it_may_work_on_after_an_output() -> None:
    class Twice(Worker):
        async def process(self, item: Job) -> None:
            await self.emit(item, more=True)
            await asyncio.sleep(item.seconds)
            await self.emit(item)

    machine = make()
    machine.__class__ = Twice
    assert run(machine, [(0.0, [2.0])]) == [("0.0", 0.0), ("0.0", 2.0)]
    assert busy_intervals(machine.pipeline.log.records, "worker") == [(0.0, 2.0)]


def test_any_progress_begins_the_deadline_again() -> None:
    machine = make()
    run(machine, [(0.0, [900.0, 1800.0, 2700.0]), (2800.0, [900.0])])
    assert machine.state is StageState.DONE


def test_a_deadline_names_the_oldest_part() -> None:
    with pytest.raises(
        WaitTimeout, match=r"a part in work to be finished; 2 parts .* since 1001\.0 s \(step 1 key 0\.1\)"
    ):
        run(make(), [(0.0, [1.0, 1e6, 1e6])])


@pytest.mark.virtual_time
async def test_an_idle_one_names_its_producer() -> None:
    with pytest.raises(WaitTimeout, match="worker waited 1000 s for an item from in"):
        await make().run()


@pytest.mark.virtual_time
async def test_a_stop_ends_every_part() -> None:
    machine = make()

    await machine.inputs[0].send(Jobs([Job("a", 9.0), Job("b", 9.0)]))
    task = asyncio.create_task(machine.run())
    await asyncio.sleep(1)
    assert machine.item == {"parts": 2}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (asyncio.all_tasks() - {asyncio.current_task()}) == set()
    assert machine.state is StageState.STOPPED
    assert machine.pool is not None and machine.pool.holders == ()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(-9, 9).filter(bool), max_size=4)), max_size=8),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_whatever_happens_it_follows_the_table(
    items: list[tuple[int, list[int]]], room: int, each_s: int
) -> None:
    """It runs exactly while a part is worked on, and hands on everything."""
    machine = make(room)
    times = sorted(at for at, _ in items)
    schedule = [(float(at), seconds) for at, (_, seconds) in zip(times, items, strict=True)]
    received = run(machine, schedule, float(each_s))

    assert len(received) == sum(each > 0 for _, seconds in items for each in seconds)
    working = sorted((at, at + abs(each)) for at, seconds in schedule for each in seconds)
    merged: list[tuple[float, float]] = []
    for start, end in working:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    assert busy_intervals(machine.pipeline.log.records, "worker") == merged

    audit = EventAudit()
    for record in machine.pipeline.log.records:
        audit.take(record.as_dict())
    assert audit.violations == []
