# SPDX-License-Identifier: Apache-2.0
"""One lane of one role: how it is made, its loop, its log, and its way out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from recipe.async_pipeline.core.channel import Channel
from recipe.async_pipeline.core.flow import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.items import StepBatch
from recipe.async_pipeline.core.pools import DevicePool
from recipe.async_pipeline.core.stage import (
    ROLES,
    RoleStateMachine,
    create_role_state_machine,
    known_roles,
    register_role,
)
from recipe.async_pipeline.core.state_machine import StageState
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import ConfigError, StageProtocolError, WaitTimeout
from tests.fakes.trainer import ALL_ROLES, SimTrainer

pytestmark = pytest.mark.virtual_time


class Echo(RoleStateMachine):
    """Hands on what it gets; `broken` makes it raise, `release_early` gives the lease back first."""

    broken: Exception | None = None
    release_early = False
    cost_s = 1.0

    async def process(self, item: Any) -> None:
        await asyncio.sleep(self.cost_s)
        self.note("SEEN", colour="red")
        if self.release_early:
            self.release()
        if self.broken is not None:
            raise self.broken
        await self.emit(item)


@pytest.fixture(autouse=True)
def echo() -> Iterator[None]:
    register_role("echo")(Echo)
    yield
    del ROLES["echo"]


def make(lane: int = 0, trainer: SimTrainer | None = None, inputs: int = 1) -> Echo:
    """An echo between its own channels, on a pool of one slot."""
    trainer = trainer or SimTrainer()
    machine = create_role_state_machine("echo", AsyncTrainingFlow(trainer), trainer, lane=lane)
    assert isinstance(machine, Echo)
    machine.inputs = tuple(Channel(f"in{i}", 4) for i in range(inputs))
    machine.outputs = (Channel("out", 4),)
    machine.pool = DevicePool("train", 1)
    machine.pipeline.machines.append(machine)
    return machine


def batch(step: int) -> StepBatch:
    return StepBatch(step=step, groups=())


async def feed(machine: Echo, *steps: int) -> None:
    for channel in machine.inputs:
        for step in steps:
            await channel.send(batch(step))
        channel.close()


def events(machine: Echo) -> list[str]:
    return [r.event for r in machine.pipeline.log.records]


# Making one.


def test_every_role_of_the_pipeline_is_registered() -> None:
    assert set(ALL_ROLES) <= set(known_roles())


def test_create_by_name() -> None:
    trainer = SimTrainer()
    machine = create_role_state_machine(
        role_name="echo", pipeline=AsyncTrainingFlow(trainer), trainer=trainer, use_async_rl=True, lane=2
    )
    assert (machine.role, machine.lane, machine.name, machine.state) == (
        "echo",
        2,
        "echo[2]",
        StageState.IDLE,
    )
    assert machine.lanes(machine.pipeline) == 1


def test_create_names_the_roles_that_there_are() -> None:
    trainer = SimTrainer()
    with pytest.raises(ConfigError, match=r"no stage is called 'ecco'.*echo.*train"):
        create_role_state_machine("ecco", AsyncTrainingFlow(trainer), trainer)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_role_and_flow_must_agree_on_being_asynchronous(asynchronous: bool) -> None:
    trainer = SimTrainer()
    flow = AsyncTrainingFlow(trainer, enable_async_rl=asynchronous)
    create_role_state_machine("echo", flow, trainer, use_async_rl=asynchronous)
    with pytest.raises(ConfigError, match="give both the same value"):
        create_role_state_machine("echo", flow, trainer, use_async_rl=not asynchronous)


def test_a_name_belongs_to_one_class() -> None:
    class Other(Echo):
        pass

    with pytest.raises(ConfigError, match="'echo' is already Echo; choose another name"):
        register_role("echo")(Other)
    assert ROLES["echo"] is Echo
    assert register_role("echo")(Echo) is Echo, "a module that is imported again registers the same class"


# The loop.


async def test_an_item_goes_through_every_state() -> None:
    machine = make()

    await feed(machine, 1, 2)
    await machine.run()
    assert [item.step async for item in machine.outputs[0]] == [1, 2], "and the output was closed behind them"
    item = ["ITEM", "LEASE", "SEEN", "OUTPUT", "RELEASE", "FINISH"]
    assert events(machine) == ["START", *item, *item, "END_OF_INPUT"]
    assert machine.state is StageState.DONE
    assert machine.pool is not None and machine.pool.holders == ()


async def test_inputs_are_joined() -> None:
    machine = make(inputs=2)

    await feed(machine, 7)
    joined = await machine.receive()
    assert joined == (batch(7), batch(7))
    assert machine.describe_item(joined) == {"step": 7}


async def test_a_join_of_different_steps_is_a_broken_protocol() -> None:
    machine = make(inputs=2)

    with pytest.raises(StageProtocolError, match=r"echo joined items of different steps \['1', '2'\]"):
        await machine.inputs[0].send(batch(1))
        await machine.inputs[1].send(batch(2))
        await machine.run()
    assert machine.state is StageState.FAILED


async def test_early_release_lets_the_next_one_in_and_is_logged_once() -> None:
    machine = make()
    machine.release_early = True

    await feed(machine, 1)
    await machine.run()
    assert events(machine).index("RELEASE") < events(machine).index("OUTPUT")
    assert events(machine).count("RELEASE") == 1


# What is logged.


@pytest.mark.parametrize("lane", [0, 1])
async def test_notes_and_moves_carry_lane_and_item(lane: int) -> None:
    machine = make(lane)

    await feed(machine, 5)
    await machine.run()
    records = machine.pipeline.log.records
    seen = next(r for r in records if r.event == "SEEN")
    assert seen.state == "RUNNING"
    assert dict(seen.fields) == {**({"lane": 1} if lane else {}), "step": 5, "colour": "red"}
    assert {r.fields.get("lane", 0) for r in records} == {lane}


# Ways out.


async def test_a_failure_returns_the_lease_and_says_why() -> None:
    machine = make()
    machine.broken = error = RuntimeError("x" * 1000)

    with pytest.raises(RuntimeError) as caught:
        await feed(machine, 1)
        await machine.run()
    assert caught.value is error
    assert machine.pool is not None and machine.pool.holders == ()
    assert machine.pipeline.failures == [("echo", error)]
    last = machine.pipeline.log.records[-1]
    assert (last.event, last.state) == ("FAIL", "FAILED")
    assert last.fields["why"].startswith("RuntimeError: xxx") and len(last.fields["why"]) == 500
    assert not machine.outputs[0].closed, "what is incomplete must not look complete"


@pytest.mark.parametrize("at_s", [0.0, 0.5])
async def test_a_stop_returns_the_lease_and_is_no_failure(at_s: float) -> None:
    machine = make()

    await machine.inputs[0].send(batch(1))
    task = asyncio.create_task(machine.run())
    await asyncio.sleep(0)
    await asyncio.sleep(at_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert machine.state is StageState.STOPPED
    assert machine.pool is not None and machine.pool.holders == ()
    assert machine.pipeline.failures == []


def test_a_wait_names_the_other_side() -> None:
    trainer = SimTrainer()
    machine, producer = make(trainer=trainer), make(lane=3, trainer=trainer)
    machine.pipeline.machines.append(producer)
    producer.outputs = machine.inputs
    with pytest.raises(WaitTimeout, match=r"echo waited 1000 s for an item from in0; echo\[3\] is IDLE"):
        run_virtual(machine.run())


async def test_a_wait_for_a_lease_names_its_holder() -> None:
    machine = make()

    with pytest.raises(WaitTimeout, match=r"a lease on pool train; train: held by another since 1000\.0 s"):
        assert machine.pool is not None
        await machine.pool.acquire("another")
        await feed(machine, 1)
        await machine.run()


async def test_a_wait_for_room_names_the_consumer() -> None:
    trainer = SimTrainer()
    machine = make(trainer=trainer)
    machine.outputs = (Channel("out", 1),)
    consumer = make(lane=1, trainer=trainer)
    consumer.inputs = machine.outputs
    machine.pipeline.machines.append(consumer)

    with pytest.raises(WaitTimeout, match=r"room in out; echo\[1\] is IDLE"):
        await feed(machine, 1, 2)
        await machine.run()
