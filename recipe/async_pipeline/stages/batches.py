# SPDX-License-Identifier: Apache-2.0
"""What the trainer needs of a batch before it updates the policy, and the critic's own update.

logp      log-probabilities under the policy that the update starts from, or one step older
ref_logp  log-probabilities under the reference policy
values    the critic's value of each token
reward    the join: scores exist since generation; here they become advantages
critic    the critic's optimizer step, concurrent with the policy's where it has separate devices

The reward function runs elsewhere: `verl_bridge/reward/executor.py` has its limits and retries.
"""

from __future__ import annotations

from ..core.groups.items import StepBatch
from ..core.lag.staleness import VersionKind
from ..core.stage import RoleStateMachine, register_role


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


@register_role("reward")
class RewardStateMachine(RoleStateMachine):
    """Waits for every parallel branch of a batch, then computes advantages on the host."""

    async def process(self, item: StepBatch | tuple[StepBatch, ...]) -> None:
        first, *others = item if isinstance(item, tuple) else (item,)
        await self.emit(await self.trainer.compute_advantages(first.merged(*others)))


@register_role("critic")
class CriticStateMachine(RoleStateMachine):
    """Steps are strictly ordered. Its results go to `train`, which finishes the step."""

    async def gate(self, item: StepBatch) -> None:
        """Waits for: the checkpoint of the previous step, with both its models. Unblocked by: train."""
        if self.pipeline.checkpoints.saves(item.step - 1):
            await self.until("saved", item.step - 1)

    async def process(self, item: StepBatch) -> None:
        judged = await self.trainer.update_critic(item)
        self.pipeline.versions.advance_critic(item.step)
        self.release()
        await self.emit(judged)
