# SPDX-License-Identifier: Apache-2.0
"""param_update: gather → send/recv → load. Only the gather holds the training devices."""

from __future__ import annotations

from ..core.groups.items import StepBatch
from ..core.stage import Pipeline, RoleStateMachine, register_role

ARENAS = 2
"""A snapshot can be gathered while the previous one is still being read."""


@register_role("param_update")
class ParamUpdateStateMachine(RoleStateMachine):
    """Version v is the weights after step v. Two lanes: gather v+1 while v is being sent."""

    _started = False

    @classmethod
    def lanes(cls, pipeline: Pipeline) -> int:
        return ARENAS

    async def receive(self) -> StepBatch:
        """Return the starting weights first, then every optimizer step."""
        if self.lane == 0 and not self._started:
            self._started = True
            return StepBatch(step=self.pipeline.schedule.first_step - 1, groups=())
        item: StepBatch = await super().receive()
        return item

    async def process(self, item: StepBatch) -> None:
        pipeline, version = self.pipeline, item.step
        if not pipeline.schedule.publishes(version):
            return
        snapshot = await self.trainer.gather(version)
        pipeline.versions.advance_gathered(version)
        self.note("GATHERED", version=version)
        self.release()
        if version >= self.pipeline.schedule.first_step:
            await self.until("served", pipeline.schedule.publication_before(version))
        publication = await self.trainer.publish(version, snapshot)
        pipeline.versions.advance_served(version)
        change = pipeline.published(publication)
        if change is not None:
            self.note("STEPPED", version=version, level=change.level.name, why=change.why)
            self.trainer.stepped(change)
        pipeline.ledger.serve(version)
        self.note(
            "SERVED",
            version=version,
            gather_s=publication.gather_s,
            transfer_s=publication.transfer_s,
            load_s=publication.load_s,
            commit_s=publication.commit_s,
            stall_s=publication.stall_s,
            bytes=publication.num_bytes,
            busy_s=publication.busy_s,
            replicas=publication.replicas,
            explained_share=publication.explained_share,
            unexplained=publication.unexplained,
        )
        seconds = await self.trainer.validate(version)
        if seconds is not None:
            self.note("VALIDATED", version=version, seconds=round(seconds, 6))
