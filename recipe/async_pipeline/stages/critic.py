# SPDX-License-Identifier: Apache-2.0
"""critic: the critic's optimizer step, concurrent with the policy's where it has separate devices."""

from __future__ import annotations

from ..core.items import StepBatch
from ..core.stage import RoleStateMachine, register_role


@register_role("critic")
class CriticStateMachine(RoleStateMachine):
    """Steps are strictly ordered. Its results go to `train`, which finishes the step."""

    async def gate(self, item: StepBatch) -> None:
        """Waits for: the checkpoint of the previous step, which must hold both models of that step.
        Unblocked by: train.
        """
        if self.pipeline.schedule.saves(item.step - 1):
            await self.until("saved", item.step - 1)

    async def process(self, item: StepBatch) -> None:
        self.pipeline.criticised[item.step] = await self.trainer.update_critic(item)
        self.pipeline.versions.advance_critic(item.step)
        self.release()
