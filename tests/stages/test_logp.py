# SPDX-License-Identifier: Apache-2.0
"""logp: under the weights of the step before, and only as long on the devices as it computes."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import StepBatch
from recipe.async_pipeline.core.state_machine import StageState
from recipe.async_pipeline.errors import WaitTimeout
from tests.fakes.trainer import SimTrainer
from tests.stages.conftest import MakeRole


def test_waits_for_the_gather_of_the_step_before_without_holding_the_devices(alone: MakeRole) -> None:
    trainer = SimTrainer()
    machine = alone("logp", trainer)
    versions = machine.pipeline.versions
    versions.advance_gathered(0)

    async def main() -> StepBatch:
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
        return batch

    assert dict(run_virtual(main()).metrics) == {"logp": 2}


@pytest.mark.parametrize("stage", ["logp", "ref_logp"])
def test_the_devices_are_free_while_it_waits_for_room(alone: MakeRole, stage: str) -> None:
    machine = alone(stage, SimTrainer(), room=1)
    machine.pipeline.versions.advance_gathered(0)

    async def main() -> None:
        await machine.outputs[0].send("full")
        await machine.inputs[0].send(StepBatch(step=1, groups=()))
        task = asyncio.create_task(machine.run())
        await asyncio.sleep(10)
        assert machine.state is StageState.WAITING_OUTPUT
        assert machine.pool is not None and machine.pool.holders == ()
        task.cancel()
        await asyncio.wait([task])

    run_virtual(main())


def test_says_what_it_waits_for(alone: MakeRole) -> None:
    machine = alone("logp", SimTrainer())

    async def main() -> None:
        await machine.inputs[0].send(StepBatch(step=3, groups=()))
        await machine.run()

    with pytest.raises(WaitTimeout, match="logp waited 1000 s for version 2 to be trained"):
        run_virtual(main())
