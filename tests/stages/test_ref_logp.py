# SPDX-License-Identifier: Apache-2.0
"""ref_logp: needs no new weights, so it waits for none."""

from __future__ import annotations

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import StepBatch
from tests.fakes.trainer import SimTrainer
from tests.stages.conftest import MakeRole


def test_runs_as_soon_as_the_batch_is_complete(alone: MakeRole) -> None:
    machine = alone("ref_logp", SimTrainer())
    assert machine.pipeline.versions.gathered == -1, "nothing was ever gathered"

    async def main() -> StepBatch:
        await machine.inputs[0].send(StepBatch(step=9, groups=(), metrics={"before": 1}))
        machine.inputs[0].close()
        await machine.run()
        batch: StepBatch = await machine.outputs[0].receive()
        return batch

    assert dict(run_virtual(main()).metrics) == {"before": 1, "ref_logp": 9}
