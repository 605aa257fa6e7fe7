# SPDX-License-Identifier: Apache-2.0
"""reward: the join. Scores exist since generation; here they become advantages.

The reward function runs elsewhere: `verl_bridge/reward/executor.py` has its limits and retries.
"""

from __future__ import annotations

from ..core.items import StepBatch
from ..core.stage import RoleStateMachine, register_role


@register_role("reward")
class RewardStateMachine(RoleStateMachine):
    """Waits for every parallel branch of a batch, then computes advantages on the host."""

    async def process(self, item: StepBatch | tuple[StepBatch, ...]) -> None:
        first, *others = item if isinstance(item, tuple) else (item,)
        await self.emit(await self.trainer.compute_advantages(first.merged(*others)))
