# SPDX-License-Identifier: Apache-2.0
"""train: the optimizer step, the last check of the age of its data, and the checkpoint.

A checkpoint of step s is taken after its bookkeeping: its weights are gathered by then, so that the replicas
need not wait for it, and its metrics are logged, so that a run that resumes from it misses none. The state of
the pipeline is taken in one turn of the event loop; generation continues meanwhile. The weights do not change
until the models are read and the storage units have noted the finished samples, because this lane also takes
the next step, and the critic waits for that as well. The devices are released once the models are read. The
rest, which is writing what was noted and hashing, continues in the background during the next steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast, get_args

from ..core.flow_state import FlowState
from ..core.groups.bad_data import skipped_update
from ..core.groups.fates import NotTrained
from ..core.groups.items import StepBatch
from ..core.lag.degradation import Level
from ..core.lag.staleness import check_lag
from ..core.lag.token_ages import masked, oldest_trained
from ..core.stage import RoleStateMachine, register_role


@register_role("train")
class TrainStateMachine(RoleStateMachine):
    """Steps are strictly ordered; the weights of the last step are gathered before the next step."""

    _saving: asyncio.Task[None] | None = None
    """The last checkpoint, until it is known to be complete."""
    _judged: StepBatch | None = None
    """What the critic has returned for this step, once it is taken."""

    async def receive(self) -> StepBatch:
        """Return the next scored batch, without the critic's results, which `_judge` takes.

        Waits for: reward. Raises ChannelClosed if the inputs have ended and are drained.
        """
        critic = self.input_from("critic")
        first, *others = await self.joined(channel for channel in self.inputs if channel is not critic)
        return cast("StepBatch", first.merged(*others))

    async def gate(self, item: StepBatch) -> None:
        """Waits for: the snapshot of the last published version; the critic, which comes first on
        these devices.

        Unblocked by: param_update's gather; critic.
        """
        before = self.pipeline.schedule.publication_before(item.step)
        await self.until("served" if self.pipeline.step_down.level >= Level.BLOCKING else "gathered", before)
        if self.trainer.pool_of("critic") == self.trainer.pool_of("train"):
            await self._judge(item)

    async def _judge(self, item: StepBatch) -> None:
        """Take the critic's results for this step, in a run with a critic.

        Waits for: the critic to have learned from this step. Unblocked by: critic.
        """
        critic = self.input_from("critic")
        if critic is not None and self._judged is None:
            await self.until("critic", item.step)
            self._judged = await self._receive_from(critic)

    async def process(self, item: StepBatch) -> None:
        facts = self._check_lags(item)
        batch = await self.trainer.update(item)
        self.pipeline.versions.advance_trained(item.step)
        skipped = skipped_update(batch.metrics)
        self.pipeline.fates.train(item.step, item.groups, skipped=skipped)
        self.pipeline.check_books()
        facts = {**facts, "train/skipped_updates": float(self.pipeline.ledger.skipped)}
        self.note("TRAINED", version=item.step, **facts)
        self.release()
        # The next gather must not wait for our bookkeeping.
        await self.emit(batch)
        await self._judge(item)
        if self._judged is not None:
            batch, self._judged = batch.merged(self._judged), None
            if not skipped and (skipped := skipped_update(batch.metrics)):
                self.pipeline.ledger.skip(item.step, skipped)
                facts = {**facts, "train/skipped_updates": float(self.pipeline.ledger.skipped)}
        share = await self.trainer.finish_step(batch, facts)
        if why := self.pipeline.measured(item.step, share):
            self.trainer.narrowed(why)
            self.note("NARROWED", step=item.step, depth=self.pipeline.queue.depth)
        if self.pipeline.checkpoints.saves(item.step):
            await self._saved()
            await self.compute_again()
            await self._save(item.step)

    async def drained(self) -> None:
        await self._saved()

    async def _saved(self) -> None:
        """Return once the last checkpoint is complete.

        Waits for: that checkpoint. Unblocked by: its publication. Its own progress bounds the wait.
        """
        if self._saving is not None:
            with self.pipeline.excused.block():
                await self._saving
            self._saving = None

    async def _save(self, step: int) -> None:
        """Start a checkpoint; return once nothing of the run is read for it any more."""
        state, all_read = self.pipeline.state(step), asyncio.Event()
        self._saving = self.pipeline.background.start(self.name, self._write(state, all_read))
        with self.pipeline.excused.block():
            await all_read.wait()
        if self._saving.done():
            # It may have failed before all was read.
            await self._saved()
        self.release()
        self.pipeline.versions.advance_saved(step)

    async def _write(self, state: FlowState, all_read: asyncio.Event) -> None:
        step, started = state.step, self.pipeline.clock.now()
        try:
            complete = await self.trainer.save(state, models_read=self.release, all_read=all_read.set)
        finally:
            all_read.set()
        if not complete:
            newest = max(self.pipeline.versions.trained, self.pipeline.versions.criticised)
            self.pipeline.checkpoints.failed(step, newest, self.pipeline.clock.now())
        else:
            self.pipeline.checkpoints.succeeded(step)
            self.pipeline.ledger.checkpointed(step, state.ledger.number)
            self.note("SAVED", step=step, version=step, seconds=round(self.pipeline.clock.now() - started, 6))

    def _check_lags(self, item: StepBatch) -> Mapping[str, float]:
        """Return the facts of the step. Raises StalenessViolation if a trajectory is older than the bound."""
        trajectories = [t for group in item.groups for t in group.trajectories]
        lags = [
            check_lag(item.step, version, self.pipeline.max_lag, f"trajectory {t.key}")
            for t in trajectories
            if (version := oldest_trained(t)) is not None
        ]
        spans = [t.last_version - t.first_version for t in trajectories]
        too_old = sum(end - start for t in trajectories if t.masked_before for start, end in masked(t))
        return {
            "batch/tail_s": max((t.seconds or 0.0 for t in trajectories), default=0.0),
            "lag/mean": sum(lags) / len(lags),
            "lag/max": float(max(lags)),
            "lag/mixed_version_share": sum(s > 0 for s in spans) / len(spans),
            "lag/masked_token_share": too_old / max(1, sum(t.num_tokens for t in trajectories)),
            "lag/param_update": float(self.pipeline.versions.trained - self.pipeline.versions.served),
            "version/trainer": float(item.step),
            "version/served_min": float(self.pipeline.versions.served),
            "queue/untrained": float(self.pipeline.queue.untrained),
            "queue/finished": float(self.pipeline.queue.finished),
            **(
                {"checkpoint/age_steps": float(self.pipeline.checkpoints.age(item.step))}
                if self.pipeline.schedule.save_every
                else {}
            ),
            **{f"samples/{fate}": float(self.pipeline.fates.count(fate)) for fate in get_args(NotTrained)},
            "samples/regenerated": float(self.pipeline.ledger.regenerated),
        }
