# SPDX-License-Identifier: Apache-2.0
"""dataloader: draws the prompts of a step as soon as the strategy admits it."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.ports import Admission
from ..core.role import RoleStateMachine, register_role


@dataclass(frozen=True)
class Ticket:
    """Leave to draw the prompts of one step."""

    step: int


@register_role("dataloader")
class DataloaderStateMachine(RoleStateMachine):
    """Its input is admission, not a channel."""

    _admission: Admission | None = None

    async def receive(self) -> Ticket:
        """Waits for: the strategy to admit the next step. Unblocked by: a publication being served."""
        if self._admission is None:
            self._admission = self.trainer.admission(self.pipeline.versions, self.pipeline.max_lag)
        step = await self._wait(
            self._admission.next_step(),
            "the next step to be admitted, i.e. for weights that are new enough to be served",
            lambda: self.pipeline.describe(m for m in self.pipeline.machines if m.role == "param_update"),
        )
        return Ticket(step)

    async def process(self, item: Ticket) -> None:
        batch = await self.trainer.draw_prompts(item.step, self.pipeline.versions.served)
        for prompt in batch.prompts:
            self.pipeline.tally.draw(prompt.uid)
        await self.emit(batch)
