# SPDX-License-Identifier: Apache-2.0
"""logp: log-probabilities under the policy that the update starts from, or one step older."""

from __future__ import annotations

from ..core.items import StepBatch
from ..core.stage import RoleStateMachine, register_role
from ..core.staleness import VersionKind


@register_role("logp")
class LogPStateMachine(RoleStateMachine):
    """The proximal policy of PPO. On the training devices it is version s-1, as in a sequential trainer.

    On separate devices it is a published version, read from the arenas that replicas load from: s-1, or
    s-2 concurrently with step s-1. No gather overwrites it meanwhile: there are two arenas, and the
    gather that needs this one comes after a step that waits for these log-probs.
    """

    async def gate(self, item: StepBatch) -> None:
        """Waits for: the version of the old policy; on the training devices also the gather that must
        come first.

        Unblocked by: train; param_update's gather.
        """
        schedule = self.pipeline.schedule
        version = schedule.old_policy(item.step)
        awaited: tuple[tuple[VersionKind, int], ...] = () if version is None else (("gathered", version),)
        if self.trainer.pool_of("logp") == self.trainer.pool_of("train"):
            awaited = (("trained", item.step - 1), ("gathered", schedule.publication_before(item.step)))
        for kind, version in awaited:
            await self.until(kind, version)

    async def process(self, item: StepBatch) -> None:
        batch = await self.trainer.compute_log_probs(item)
        self.note("OLD_POLICY", version=self.pipeline.schedule.old_policy(item.step))
        self.release()
        await self.emit(batch)
