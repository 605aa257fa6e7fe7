# SPDX-License-Identifier: Apache-2.0
"""A stage of your own, between `reward` and `train`: it has a loop, states and events like the others.

python examples/my_stage.py                         here, in virtual time, with Python alone
... +trainer.v1.async_pipeline.custom_stages='["examples.my_stage:Audit@reward->train"]'    in a run
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipe.async_pipeline import RoleStateMachine, register_role
from recipe.async_pipeline.strategies import OneStepOff


@register_role("audit")
class Audit(RoleStateMachine):
    """Notes the oldest version in each batch; it could also change the batch, or wait for a person."""

    async def process(self, item):
        self.note("AUDITED", oldest=item.first_version, responses=item.num_trajectories)
        await self.emit(item)


if __name__ == "__main__":
    from hello_pipeline import BATCH, STEPS, run

    flow, _, _ = run(
        OneStepOff(batch=BATCH, last_step=STEPS, max_lag=1), stages=[("audit", "reward", "train")]
    )
    for record in flow.log.records:
        if record.event == "AUDITED":
            print(f"{record.t:6.2f} s  {record.fields}")
