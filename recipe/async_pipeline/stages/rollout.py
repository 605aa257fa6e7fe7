# SPDX-License-Identifier: Apache-2.0
"""rollout: decides the fate of finished groups and joins them into the batch of the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..core.items import Group, StepBatch
from ..core.stage import RoleStateMachine, register_role
from ..errors import ConservationError

TOO_OLD = "all of its tokens are too old"


@register_role("rollout")
class RolloutStateMachine(RoleStateMachine):
    """Groups may finish in any order and for several steps at once; batches leave in step order."""

    _resumed: deque[StepBatch | Group] | None = None
    """Batches and groups of a checkpoint that this stage has to process."""

    async def receive(self) -> StepBatch | Group:
        """Return the contents of a checkpoint first: the steps that were taken, and groups without a
        decision.
        """
        if self._resumed is None:
            self._resumed = deque(self._held())
        if self._resumed:
            return self._resumed.popleft()
        item: Group = await super().receive()
        return item

    async def process(self, item: StepBatch | Group) -> None:
        if isinstance(item, StepBatch):
            await self._join(item.step, item.groups)
        else:
            await self._judge(item)
        queue = self.pipeline.queue
        while (step := queue.next_step) <= self.pipeline.schedule.last_step and (groups := queue.take(step)):
            await self._join(step, groups)

    def _held(self) -> Iterator[StepBatch | Group]:
        if self.pipeline.resumed is not None:
            state = self.pipeline.resumed.queue
            yield from (StepBatch(step=step, groups=groups) for step, groups in sorted(state.taken.items()))
            yield from (entry.answer for entry in state.entries if entry.answer is not None)

    async def _judge(self, group: Group) -> None:
        fate = self.trainer.rejects(group)
        if fate is None and self.pipeline.queue.is_too_old(group):
            self.pipeline.queue.give_back(group.uid)
            self.pipeline.fates.settle(group.uid, "expired", why=TOO_OLD, group=group)
            self.note("REJECTED", key=group.uid, fate="expired", why=TOO_OLD)
            await self.trainer.discard(group)
        elif fate is None:
            self.pipeline.queue.put(group)
        else:
            self.pipeline.fates.settle(group.uid, fate, why=group.flaw, group=group)
            self.note("REJECTED", key=group.uid, fate=fate, **({"why": group.flaw} if group.flaw else {}))
            await self.trainer.discard(group)

    async def _join(self, step: int, groups: Sequence[Group]) -> None:
        batch = await self.trainer.assemble(step, groups)
        before = {group.uid: group for group in groups}
        for group in batch.groups:
            if group is not before[group.uid]:
                self.pipeline.ledger.score(group)
        self._item = {"step": step}
        self.note("ASSEMBLED", keys=[group.uid for group in groups])
        await self.emit(batch, more=True)

    async def drained(self) -> None:
        """Raise ConservationError if groups are left that no step took."""
        left = self.pipeline.queue.untrained
        if left:
            raise ConservationError(f"data ended with {left} groups that no step took")
