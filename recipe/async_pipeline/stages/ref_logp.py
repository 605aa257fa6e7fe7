# SPDX-License-Identifier: Apache-2.0
"""ref_logp: log-probabilities of the batch under the frozen reference policy."""

from __future__ import annotations

from ..core.items import StepBatch
from ..core.role import RoleStateMachine, register_role


@register_role("ref_logp")
class RefLogPStateMachine(RoleStateMachine):
    """The reference never changes, so a batch may be computed as soon as it is complete."""

    async def process(self, item: StepBatch) -> None:
        batch = await self.trainer.compute_ref_log_probs(item)
        self.release()
        await self.emit(batch)
