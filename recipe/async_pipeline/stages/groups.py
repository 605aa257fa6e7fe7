# SPDX-License-Identifier: Apache-2.0
"""From prompts to batches: the stages that work on groups.

dataloader  draws prompts as soon as the message queue has room; prompts that a crash interrupted first
generate    generates responses; each group is handed on when its last response is finished
teacher     has a teacher read each group, in a run that distills one
rollout     decides the fate of finished groups and joins them into the batch of the next step
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ..core.concurrent_stage import ConcurrentStage
from ..core.groups.items import Admission, Group, Prompt, PromptBatch, StepBatch
from ..core.stage import RoleStateMachine, register_role
from ..errors import ConservationError, StageProtocolError

TOO_OLD = "all of its tokens are too old"


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
            self.pipeline.ledger.generate_again(prompt.uid, "resumed", version, prompt.kept_tokens)
        size = self.pipeline.queue.batch
        for first in range(0, len(prompts), size):
            some = tuple(prompts[first : first + size])
            await self.emit(PromptBatch(step=step, prompts=some, admitted_version=version), more=True)


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
                self.pipeline.ledger.generate_again(uid, "flawed", self.pipeline.versions.served)
                continue

            if group is not None:
                await self.trainer.discard(group)
            self.note("RECALLED", fate=recall.verdict)
            if recall.verdict == "drop":
                return None
            recalls += 1
            self.pipeline.ledger.generate_again(uid, "stale", self.pipeline.versions.served)


@register_role("teacher")
class TeacherStateMachine(ConcurrentStage):
    """Groups are read while others are still generated; all that have arrived, at once."""

    awaits = "a group to be read by its teacher"
    doing = "groups are being read by their teachers"
    _resumed: deque[Group] | None = None
    """Groups of a checkpoint that have no decision yet; some may have been read."""

    async def receive(self) -> Group:
        """Return the groups of a checkpoint first."""
        if self._resumed is None:
            resumed = self.pipeline.resumed
            self._resumed = deque() if resumed is None else deque(resumed.queue.undecided())
        return self._resumed.popleft() if self._resumed else await super().receive()

    async def process(self, item: Group) -> None:
        if not item.taught and self.trainer.rejects(item) is None:
            item = await self.trainer.ask_teacher(item)
            # A checkpoint must know.
            self.pipeline.queue.arrive(item)
        await self.emit(item)


@register_role("rollout")
class RolloutStateMachine(RoleStateMachine):
    """Groups may finish in any order and for several steps at once; batches leave in step order."""

    _resumed: deque[StepBatch | Group] | None = None
    """Batches and groups of a checkpoint that this stage has to process."""

    async def receive(self) -> StepBatch | Group:
        """Return what a checkpoint held first: the steps that were taken, and groups without a decision."""
        if self._resumed is None:
            self._resumed = deque(self._held())
        if self._resumed:
            return self._resumed.popleft()
        item: Group = await super().receive()
        return item

    async def process(self, item: StepBatch | Group) -> None:
        if isinstance(item, StepBatch):
            await self._join(item.step, item.groups)
        else:
            await self._judge(item)
        queue = self.pipeline.queue
        while (step := queue.next_step) <= self.pipeline.schedule.last_step and (groups := queue.take(step)):
            await self._join(step, groups)

    def _held(self) -> Iterator[StepBatch | Group]:
        if self.pipeline.resumed is not None:
            state = self.pipeline.resumed.queue
            yield from (StepBatch(step=step, groups=groups) for step, groups in sorted(state.taken.items()))
            if self.input_from("teacher") is None:
                yield from state.undecided()

    async def _judge(self, group: Group) -> None:
        fate = self.trainer.rejects(group)
        if fate is None and self.pipeline.queue.is_too_old(group):
            self.pipeline.queue.give_back(group.uid)
            self.pipeline.fates.settle(group.uid, "expired", why=TOO_OLD, group=group)
            self.note("REJECTED", key=group.uid, fate="expired", why=TOO_OLD)
            await self.trainer.discard(group)
        elif fate is None:
            self.pipeline.queue.put(group)
        else:
            self.pipeline.fates.settle(group.uid, fate, why=group.flaw, group=group)
            self.note("REJECTED", key=group.uid, fate=fate, **({"why": group.flaw} if group.flaw else {}))
            await self.trainer.discard(group)

    async def _join(self, step: int, groups: Sequence[Group]) -> None:
        batch = await self.trainer.assemble(step, groups)
        before = {group.uid: group for group in groups}
        for group in batch.groups:
            if group is not before[group.uid]:
                self.pipeline.ledger.score(group)
        self._item = {"step": step}
        self.note("ASSEMBLED", keys=[group.uid for group in groups])
        await self.emit(batch, more=True)

    async def drained(self) -> None:
        """Raise ConservationError if groups are left that no step took."""
        left = self.pipeline.queue.untrained
        if left:
            raise ConservationError(f"data ended with {left} groups that no step took")
