# SPDX-License-Identifier: Apache-2.0
"""rollout: decides the fate of finished groups and joins them into the batch of the next step."""

from __future__ import annotations

from ..core.items import Group
from ..core.role import RoleStateMachine, register_role
from ..errors import ConservationError


@register_role("rollout")
class RolloutStateMachine(RoleStateMachine):
    """Groups may finish in any order and for several steps at once; batches leave in step order."""

    _next_step: int | None = None

    async def process(self, item: Group) -> None:
        queue, tally = self.pipeline.queue, self.pipeline.tally
        if self._next_step is None:
            self._next_step = self.trainer.first_step
        fate = self.trainer.rejects(item)
        if fate is None:
            queue.put(item)
        else:
            tally.give_up(item.uid, fate)
            queue.give_back(item.uid)
            self.note("REJECTED", key=item.uid, fate=fate, **({"why": item.flaw} if item.flaw else {}))
            await self.trainer.discard(item)
        while self._next_step <= self.trainer.last_step and (groups := queue.take(self._next_step)):
            batch = await self.trainer.assemble(self._next_step, groups)
            self._item = {"step": self._next_step}
            self.note("ASSEMBLED", keys=[group.uid for group in groups])
            self._next_step += 1
            await self.emit(batch, more=True)

    async def drained(self) -> None:
        """Raises ConservationError: groups are left that no step took."""
        left = self.pipeline.queue.untrained
        if left:
            raise ConservationError(f"data ended with {left} groups that no step took")
