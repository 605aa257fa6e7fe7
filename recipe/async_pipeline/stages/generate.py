# SPDX-License-Identifier: Apache-2.0
"""generate: generates responses; each group is handed on when its last response is finished."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..core.items import Group, Prompt, PromptBatch
from ..core.stage import RoleStateMachine, register_role

if TYPE_CHECKING:
    from ..core.flow import AsyncTrainingFlow

FATES = {"regenerate": "resume", "drop": "drop"}
"""Verdicts of the message queue, and their names in `events.jsonl`."""


@register_role("generate")
class GenerateStateMachine(RoleStateMachine):
    """A lane holds the prompts of one ticket until the longest response is finished; lanes overlap.

    A finished group is handed on at once: the rollout pushes completions, nothing polls for them.
    """

    @classmethod
    def lanes(cls, pipeline: AsyncTrainingFlow) -> int:
        """Return the number of tickets that may be in work.

        A batch may be in flight for each version that the rollout may lag, and one more; and as many
        tickets again may have been issued while stragglers of earlier batches are still generated.
        """
        return 2 * (pipeline.max_lag + 1)

    async def process(self, item: PromptBatch) -> None:
        tasks = [
            asyncio.create_task(self._answer(prompt), name=f"generate:{prompt.uid}")
            for prompt in item.prompts
        ]
        try:
            for finished in asyncio.as_completed(tasks):
                group = await self._wait(
                    finished,
                    f"one of the groups of step {item.step} to be answered",
                    lambda: (
                        f"{sum(not t.done() for t in tasks)} of {len(tasks)} groups are being answered or "
                        "scored"
                    ),
                )
                if group is not None:
                    version = {"version": group.first_version} if group.trajectories else {}
                    self._item = {"step": item.step, "key": group.uid, **version}
                    await self.emit(group, more=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._item = {"step": item.step}

    async def _answer(self, prompt: Prompt) -> Group | None:
        """Return the finished group, or None if it was given up because it held up a step."""
        queue, uid = self.pipeline.queue, prompt.uid
        while True:
            task = asyncio.create_task(self.trainer.generate_group(prompt), name=f"answer:{uid}")
            queue.watch(uid, task.cancel)
            try:
                group = await task
                verdict = queue.arrive(group)
                if verdict is None and not group.again:
                    self.pipeline.ledger.finish(group)
                    return group
                await self.trainer.discard(group)
                if verdict is None:
                    self.note("FLAWED", key=uid, why=group.flaw)
                    self.pipeline.ledger.answer_again(uid, "flawed", self.pipeline.versions.served)
                    continue
            except asyncio.CancelledError:
                verdict = queue.verdict(uid)
                if verdict is None:  # the run is being stopped
                    raise
            self.note("RECALLED", key=uid, fate=FATES[verdict])
            if verdict == "drop":
                return None
            self.pipeline.ledger.answer_again(uid, "stale", self.pipeline.versions.served)
