# SPDX-License-Identifier: Apache-2.0
"""logp: log-probabilities of the batch under the trainer's policy before its update."""

from __future__ import annotations

from ..core.items import StepBatch
from ..core.role import RoleStateMachine, register_role
from ..core.staleness import Kind


@register_role("logp")
class LogPStateMachine(RoleStateMachine):
    """Step s is computed under version s-1, as in a sequential trainer: the proximal policy of PPO."""

    async def gate(self, item: StepBatch) -> None:
        """Waits for: version step-1, and the snapshot of the last one that is published.

        Unblocked by: train; param_update's gather.
        """
        snapshot = self.pipeline.publication_before(item.step)
        awaited: tuple[tuple[Kind, int], ...] = (("trained", item.step - 1), ("gathered", snapshot))
        for kind, version in awaited:
            await self._wait(
                self.pipeline.versions.wait_for(kind, version),
                f"version {version} to be {kind}",
                lambda: self.pipeline.describe(
                    m for m in self.pipeline.machines if m.role in ("train", "param_update")
                ),
            )

    async def process(self, item: StepBatch) -> None:
        batch = await self.trainer.compute_log_probs(item)
        self.release()
        await self.emit(batch)
