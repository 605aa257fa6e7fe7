# SPDX-License-Identifier: Apache-2.0
"""rollout: collects finished groups and joins them into the batch of the next step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..core.items import Group
from ..core.role import RoleStateMachine, register_role
from ..errors import ConservationError


@register_role("rollout")
class RolloutStateMachine(RoleStateMachine):
    """Groups may finish in any order and for several steps at once; batches leave in step order."""

    _waiting: defaultdict[int, list[Group]] | None = None
    _next_step: int | None = None

    async def process(self, item: Group) -> None:
        if self._waiting is None or self._next_step is None:
            self._waiting, self._next_step = defaultdict(list), self.trainer.first_step
        self._waiting[item.step].append(item)
        while groups := self.trainer.take_batch(self._next_step, self._waiting):
            self._forget(groups)
            batch = await self.trainer.assemble(self._next_step, groups)
            self._item = {"step": self._next_step}
            self._next_step += 1
            await self.emit(batch, more=True)

    def _forget(self, groups: Sequence[Group]) -> None:
        taken = {g.uid for g in groups}
        assert self._waiting is not None
        for step in list(self._waiting):
            left = [g for g in self._waiting[step] if g.uid not in taken]
            if left:
                self._waiting[step] = left
            else:
                del self._waiting[step]

    async def drained(self) -> None:
        """Raises ConservationError: finished groups are left that no step took."""
        left = {step: len(groups) for step, groups in (self._waiting or {}).items() if groups}
        if left:
            raise ConservationError(f"data ended with finished groups that no step took: {left} (step: groups)")
