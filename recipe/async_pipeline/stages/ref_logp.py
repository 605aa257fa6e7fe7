# SPDX-License-Identifier: Apache-2.0
"""ref_logp: log-probabilities of the batch under the reference policy."""

from __future__ import annotations

from ..core.items import StepBatch
from ..core.stage import RoleStateMachine, register_role


@register_role("ref_logp")
class RefLogPStateMachine(RoleStateMachine):
    """The reference is frozen, or a published version that is replaced periodically, so it does not
    depend on the previous step.

    A version that becomes the reference stays in its arena until the step of this batch is over; see
    `logp`.
    """

    async def gate(self, item: StepBatch) -> None:
        """Waits for: the version that is the reference. Unblocked by: param_update's gather."""
        version = self.pipeline.schedule.reference(item.step)
        if version is not None:
            await self.until("gathered", version)

    async def process(self, item: StepBatch) -> None:
        batch = await self.trainer.compute_ref_log_probs(item)
        self.release()
        await self.emit(batch)
