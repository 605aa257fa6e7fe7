# SPDX-License-Identifier: Apache-2.0
"""generate: answers prompts; each group goes on the moment its last answer is done."""

from __future__ import annotations

import asyncio

from ..core.items import PromptBatch
from ..core.ports import PipelineTrainer
from ..core.role import RoleStateMachine, register_role


@register_role("generate")
class GenerateStateMachine(RoleStateMachine):
    """A lane holds one admitted batch until its longest answer is finished; lanes overlap.

    A finished group is handed on at once: completion is pushed by the rollout, never polled for.
    """

    @classmethod
    def lanes(cls, trainer: PipelineTrainer) -> int:
        """One batch may be in flight for each version that the rollout may lag, and one more."""
        return trainer.max_lag + 1

    async def process(self, item: PromptBatch) -> None:
        tasks = [
            asyncio.create_task(self.trainer.generate_group(prompt), name=f"generate:{prompt.uid}")
            for prompt in item.prompts
        ]
        try:
            for finished in asyncio.as_completed(tasks):
                group = await self._wait(
                    finished,
                    f"one of the groups of step {item.step} to be answered",
                    lambda: f"{sum(not t.done() for t in tasks)} of {len(tasks)} groups are with the rollout servers",
                )
                self._item = {"step": item.step, "key": group.uid, "version": group.first_version}
                await self.emit(group, more=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._item = {"step": item.step}

