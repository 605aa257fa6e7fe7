# SPDX-License-Identifier: Apache-2.0
"""values: the critic's value of each token of the batch."""

from __future__ import annotations

from ..core.items import StepBatch
from ..core.stage import RoleStateMachine, register_role


@register_role("values")
class ValuesStateMachine(RoleStateMachine):
    """Step s is valued by the critic that has learned from step s-1, as in a sequential trainer."""

    async def gate(self, item: StepBatch) -> None:
        """Waits for: the critic's last update. Unblocked by: critic."""
        await self.until("critic", item.step - 1)

    async def process(self, item: StepBatch) -> None:
        batch = await self.trainer.compute_values(item)
        self.release()
        await self.emit(batch)
