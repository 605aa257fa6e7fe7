# SPDX-License-Identifier: Apache-2.0
"""ref_logp: log-probabilities of the batch under the reference policy."""

from __future__ import annotations

from ..core.items import StepBatch
from ..core.role import RoleStateMachine, register_role


@register_role("ref_logp")
class RefLogPStateMachine(RoleStateMachine):
    """The reference is frozen, or a published version that is replaced now and then, so it needs nothing of
    the step before.

    A version that it takes over lies in its arena until the step is over that this batch is for; see `logp`.
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
