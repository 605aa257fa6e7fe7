# SPDX-License-Identifier: Apache-2.0
"""generate: generates responses; each group is handed on when its last response is finished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..core.concurrent_stage import ConcurrentStage
from ..core.items import Group, Prompt, PromptBatch
from ..core.stage import register_role
from ..errors import StageProtocolError


@register_role("generate")
class GenerateStateMachine(ConcurrentStage):
    """All admitted groups are in flight at once: only the message queue bounds them.

    A finished group is handed on at once: the rollout pushes completions, nothing polls for them.
    """

    awaits = "a group to be answered"
    doing = "groups are being answered or scored"

    def split(self, item: PromptBatch) -> Iterable[Prompt]:
        return item.prompts

    async def process(self, item: Prompt) -> None:
        group = await self._answer(item)
        if group is not None:
            if group.trajectories:
                self._item = {**self._item, "version": group.first_version}
            await self.emit(group)

    async def _answer(self, prompt: Prompt) -> Group | None:
        """Return the finished group, or None if it was given up because it held up a step."""
        queue, uid, recalls = self.pipeline.queue, prompt.uid, 0
        while True:
            recall = queue.watch(uid)
            group = await self.trainer.generate_group(prompt, recall)
            if recall.verdict is None:
                if group is None:
                    raise StageProtocolError(f"generate: group {uid} came back empty, but was not recalled")
                group = replace(group, recalls=recalls) if recalls else group
                queue.arrive(group)
                if not group.again:
                    self.pipeline.ledger.finish(group)
                    return group
                await self.trainer.discard(group)
                self.note("FLAWED", why=group.flaw)
                self.pipeline.ledger.answer_again(uid, "flawed", self.pipeline.versions.served)
                continue

            if group is not None:
                await self.trainer.discard(group)
            self.note("RECALLED", fate=recall.verdict)
            if recall.verdict == "drop":
                return None
            recalls += 1
            self.pipeline.ledger.answer_again(uid, "stale", self.pipeline.versions.served)
