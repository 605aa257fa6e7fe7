# SPDX-License-Identifier: Apache-2.0
"""dataloader: draws prompts as soon as the message queue has room; prompts that a crash interrupted first."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.items import Admission, PromptBatch
from ..core.stage import RoleStateMachine, register_role


@register_role("dataloader")
class DataloaderStateMachine(RoleStateMachine):
    """Its input is admission, not a channel."""

    _resumes = True

    async def receive(self) -> Admission | tuple[str, ...]:
        """Return the prompts to dispatch again, once; then admissions.

        Waits for: an admission. Unblocked by: a weight update that is served, or a group that is given
        up.
        """
        resumed, self._resumes = self.pipeline.resumed if self._resumes else None, False
        if resumed is not None and (uids := resumed.in_flight()):
            return uids
        admission: Admission = await self._wait(
            self.pipeline.queue.next_admission(),
            "leave to draw prompts, i.e. for weights that are new enough to be served",
            lambda: self.pipeline.describe(m for m in self.pipeline.machines if m.role == "param_update"),
        )
        return admission

    async def gate(self, item: Admission | tuple[str, ...]) -> None:
        """Waits for: weights to generate with. Unblocked by: the first weight update."""
        if not isinstance(item, Admission):
            await self.until("served", self.pipeline.schedule.first_step - 1)

    async def process(self, item: Admission | tuple[str, ...]) -> None:
        if not isinstance(item, Admission):
            await self._send_again(item)
            return
        batch = await self.trainer.draw_prompts(item)
        for prompt in batch.prompts:
            self.pipeline.ledger.draw(prompt.uid, item.step, item.version)
            self.pipeline.queue.enter(prompt, item.version)
        self.note("DRAWN", version=item.version, keys=[prompt.uid for prompt in batch.prompts])
        await self.emit(batch)

    async def _send_again(self, uids: Sequence[str]) -> None:
        """Emit batches of the usual size, so that events and errors name a few prompts."""
        version, step = self.pipeline.versions.served, self.pipeline.schedule.first_step
        prompts = await self.trainer.restore_prompts(uids)
        for prompt in prompts:
            self.pipeline.ledger.answer_again(prompt.uid, "resumed", version, prompt.kept_tokens)
        size = self.pipeline.queue.batch
        for first in range(0, len(prompts), size):
            some = tuple(prompts[first : first + size])
            await self.emit(PromptBatch(step=step, prompts=some, admitted_version=version), more=True)
