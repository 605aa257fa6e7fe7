# SPDX-License-Identifier: Apache-2.0
"""logp: log-probabilities of the batch under the trainer's policy before its update."""

from __future__ import annotations

from ..core.items import StepBatch
from ..core.role import RoleStateMachine, register_role


@register_role("logp")
class LogPStateMachine(RoleStateMachine):
    """Step s is computed under version s-1, as in a sequential trainer: the proximal policy of PPO."""

    async def gate(self, item: StepBatch) -> None:
        """Waits for: the snapshot of version step-1. Unblocked by: param_update's gather."""
        await self._wait(
            self.pipeline.versions.wait_for("gathered", item.step - 1),
            f"version {item.step - 1} to be trained and gathered",
            lambda: self.pipeline.describe(
                m for m in self.pipeline.machines if m.role in ("train", "param_update")
            ),
        )

    async def process(self, item: StepBatch) -> None:
        batch = await self.trainer.compute_log_probs(item)
        self.release()
        await self.emit(batch)
