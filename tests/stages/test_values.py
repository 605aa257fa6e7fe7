# SPDX-License-Identifier: Apache-2.0
"""values: by the critic of the step before, and without holding the devices that it needs to get there."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import StepBatch
from recipe.async_pipeline.errors import WaitTimeout
from tests.fakes.trainer import WITH_CRITIC, SimTrainer
from tests.stages.conftest import MakeRole


def test_waits_for_the_critic_without_holding_its_devices(alone: MakeRole) -> None:
    trainer = SimTrainer(roles=WITH_CRITIC)
    trainer.criticised = 2
    machine = alone("values", trainer)

    async def main() -> StepBatch:
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
        return batch

    assert dict(run_virtual(main()).metrics) == {"values": 3}


def test_says_what_it_waits_for(alone: MakeRole) -> None:
    machine = alone("values", SimTrainer(roles=WITH_CRITIC))

    async def main() -> None:
        await machine.inputs[0].send(StepBatch(step=2, groups=()))
        await machine.run()

    with pytest.raises(WaitTimeout, match="values waited 1000 s for the critic to have learned from step 1"):
        run_virtual(main())
