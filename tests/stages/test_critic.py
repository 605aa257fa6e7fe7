# SPDX-License-Identifier: Apache-2.0
"""critic: one update a step, which unblocks its waiters."""

from __future__ import annotations

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import StepBatch
from tests.fakes.trainer import WITH_CRITIC, SimTrainer
from tests.stages.conftest import MakeRole


def test_learns_step_by_step_and_says_so(alone: MakeRole) -> None:
    trainer = SimTrainer(roles=WITH_CRITIC)
    machine = alone("critic", trainer)

    async def main() -> None:
        for step in (1, 2):
            await machine.inputs[0].send(StepBatch(step=step, groups=()))
        machine.inputs[0].close()
        await machine.run()

    run_virtual(main())
    assert trainer.calls == ["critic:1", "critic:2"]
    assert {step: dict(batch.metrics) for step, batch in machine.pipeline.criticised.items()} == {
        1: {"critic": 1},
        2: {"critic": 2},
    }
    run_virtual(machine.pipeline.versions.wait_for("critic", 2))
    assert machine.pool is not None and machine.pool.holders == ()
