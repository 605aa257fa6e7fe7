# SPDX-License-Identifier: Apache-2.0
"""dataloader: draws prompts as soon as the message queue has room for them."""

from __future__ import annotations

from ..core.items import Ticket
from ..core.role import RoleStateMachine, register_role


@register_role("dataloader")
class DataloaderStateMachine(RoleStateMachine):
    """Its input is admission, not a channel."""

    async def receive(self) -> Ticket:
        """Waits for: leave to draw. Unblocked by: a publication being served; a group that is given up."""
        ticket: Ticket = await self._wait(
            self.pipeline.queue.next_ticket(),
            "leave to draw prompts, i.e. for weights that are new enough to be served",
            lambda: self.pipeline.describe(m for m in self.pipeline.machines if m.role == "param_update"),
        )
        return ticket

    async def process(self, item: Ticket) -> None:
        batch = await self.trainer.draw_prompts(item)
        for prompt in batch.prompts:
            self.pipeline.tally.draw(prompt.uid)
            self.pipeline.queue.enter(prompt, item.version)
        self.note("DRAWN", version=item.version, keys=[prompt.uid for prompt in batch.prompts])
        await self.emit(batch)
