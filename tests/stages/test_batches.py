# SPDX-License-Identifier: Apache-2.0
"""What a batch needs is computed under the right weights, and holds the devices only meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.core.channel import Channel
from recipe.async_pipeline.core.groups.items import StepBatch
from recipe.async_pipeline.core.stage import RoleStateMachine
from recipe.async_pipeline.core.state_machine import StageState
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import StageProtocolError, WaitTimeout
from tests.fakes.trainer import WITH_CRITIC, SimTrainer
from tests.stages.conftest import MakeRole

pytestmark = pytest.mark.virtual_time

# logp


async def test_waits_for_the_gather_of_the_step_before_without_holding_the_devices(alone: MakeRole) -> None:
    trainer = SimTrainer()
    machine = alone("logp", trainer)
    versions = machine.pipeline.versions
    versions.advance_gathered(0)

    await machine.inputs[0].send(StepBatch(step=2, groups=()))
    task = asyncio.create_task(machine.run())
    await asyncio.sleep(10)
    assert trainer.calls == []
    assert machine.pool is not None and machine.pool.holders == (), "train needs them to get there"
    versions.advance_trained(1)
    await asyncio.sleep(10)
    assert trainer.calls == [], "trained, but the copy is still being made"
    versions.advance_gathered(1)
    batch: StepBatch = await machine.outputs[0].receive()
    task.cancel()
    await asyncio.wait([task])
    assert dict(batch.metrics) == {"logp": 2}


@pytest.mark.parametrize("stage", ["logp", "ref_logp"])
async def test_the_devices_are_free_while_it_waits_for_room(alone: MakeRole, stage: str) -> None:
    machine = alone(stage, SimTrainer(), room=1)
    machine.pipeline.versions.advance_gathered(0)

    await machine.outputs[0].send("full")
    await machine.inputs[0].send(StepBatch(step=1, groups=()))
    task = asyncio.create_task(machine.run())
    await asyncio.sleep(10)
    assert machine.state is StageState.WAITING_OUTPUT
    assert machine.pool is not None and machine.pool.holders == ()
    task.cancel()
    await asyncio.wait([task])


async def test_logp_says_what_it_waits_for(alone: MakeRole) -> None:
    machine = alone("logp", SimTrainer())

    with pytest.raises(WaitTimeout, match="logp waited 1000 s for version 2 to be trained"):
        await machine.inputs[0].send(StepBatch(step=3, groups=()))
        await machine.run()


# ref_logp


async def test_runs_as_soon_as_the_batch_is_complete(alone: MakeRole) -> None:
    machine = alone("ref_logp", SimTrainer())
    assert machine.pipeline.versions.gathered == -1, "nothing was ever gathered"

    await machine.inputs[0].send(StepBatch(step=9, groups=(), metrics={"before": 1}))
    machine.inputs[0].close()
    await machine.run()
    batch: StepBatch = await machine.outputs[0].receive()
    assert dict(batch.metrics) == {"before": 1, "ref_logp": 9}


# values


async def test_waits_for_the_critic_without_holding_its_devices(alone: MakeRole) -> None:
    trainer = SimTrainer(roles=WITH_CRITIC)
    trainer.criticised = 2
    machine = alone("values", trainer)

    await machine.inputs[0].send(StepBatch(step=3, groups=()))
    task = asyncio.create_task(machine.run())
    machine.pipeline.versions.advance_critic(1)
    await asyncio.sleep(10)
    assert trainer.calls == []
    assert machine.pool is not None and machine.pool.holders == ()
    machine.pipeline.versions.advance_critic(2)
    batch: StepBatch = await machine.outputs[0].receive()
    assert machine.pool.holders == ()
    task.cancel()
    await asyncio.wait([task])
    assert dict(batch.metrics) == {"values": 3}


async def test_values_says_what_it_waits_for(alone: MakeRole) -> None:
    machine = alone("values", SimTrainer(roles=WITH_CRITIC))

    with pytest.raises(WaitTimeout, match="values waited 1000 s for the critic to have learned from step 1"):
        await machine.inputs[0].send(StepBatch(step=2, groups=()))
        await machine.run()


# reward


async def join(machine: RoleStateMachine, *batches: StepBatch) -> StepBatch:
    machine.inputs = tuple(Channel(f"in{i}", 1) for i in range(len(batches)))
    for channel, batch in zip(machine.inputs, batches, strict=True):
        await channel.send(batch)
        channel.close()
    await machine.run()
    joined: StepBatch = await machine.outputs[0].receive()
    return joined


def found(name: str, step: int = 1) -> StepBatch:
    return StepBatch(step=step, groups=(), payload=name, metrics={name: step}, timing_s={name: 1.0})


def test_joins_logp_and_ref_logp(alone: MakeRole) -> None:
    trainer = SimTrainer()
    joined = run_virtual(join(alone("reward", trainer), found("logp"), found("ref_logp")))
    assert joined.payload == "logp"
    assert dict(joined.metrics) == {"logp": 1, "ref_logp": 1}
    assert dict(joined.timing_s) == {"logp": 1.0, "ref_logp": 1.0}
    assert trainer.calls == ["advantage:1"]


def test_without_a_reference_there_is_nothing_to_join(alone: MakeRole) -> None:
    assert run_virtual(join(alone("reward", SimTrainer()), found("logp"))) == found("logp")


def test_branches_of_different_steps_are_never_joined(alone: MakeRole) -> None:
    trainer = SimTrainer()
    with pytest.raises(StageProtocolError, match="reward joined items of different steps"):
        run_virtual(join(alone("reward", trainer), found("logp", 1), found("ref_logp", 2)))
    assert trainer.calls == []


# critic


async def test_learns_step_by_step_and_says_so(alone: MakeRole) -> None:
    trainer = SimTrainer(roles=WITH_CRITIC)
    machine = alone("critic", trainer)

    for step in (1, 2):
        await machine.inputs[0].send(StepBatch(step=step, groups=()))
    machine.inputs[0].close()
    await machine.run()
    assert trainer.calls == ["critic:1", "critic:2"]
    (out,) = machine.outputs
    judged = [await out.receive() for _ in range(len(out))]
    assert [(batch.step, dict(batch.metrics)) for batch in judged] == [(1, {"critic": 1}), (2, {"critic": 2})]
    await machine.pipeline.versions.wait_for("critic", 2)
    assert machine.pool is not None and machine.pool.holders == ()
