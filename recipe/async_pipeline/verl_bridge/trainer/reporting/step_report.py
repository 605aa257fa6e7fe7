# SPDX-License-Identifier: Apache-2.0
"""Report each step: all metrics to the trackers, and one line to the user.

The report of a step is computed in a thread while the next step trains:

    train lane ──► finish(step) ──► the report of step - 1 is done ──► thread: metrics, trackers, free samples
                                    └── the next step begins at once, except after a step with a checkpoint

Metrics and trackers are observers: one that keeps failing is switched off. What frees the samples is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import transfer_queue as tq

from ....agents.episodes import FAILURES, explain_rows, metrics_by_source, metrics_of
from ....core.groups.bad_data import BadData, is_round, skipped_update
from ....core.groups.items import StepBatch
from ....core.schedule import Schedule
from ....observe.account.accountant import StepAccountant
from ....observe.observers import ACCOUNT, FILE_ATTEMPTS, LOST, OFF_POLICY, SELECTION, Observers
from ....observe.run_directory.summary import RunRecorder
from ....observe.table import StepRow, progress
from ....observe.trackers import Trackers
from ...calls.ray_calls import BlockingCalls
from ..batches.verl_stages import VerlStages, own_copy
from ..weight_publisher import WeightPublisher
from .episode_texts import KeptPictures, log_rollout_data
from .ray_metrics import RayGauges
from .sample_metrics import SampleMeters
from .terminal import echo, say

SHOWN_REPLICAS = 16
"""Maximum number of replicas for which each replica's served version is a metric."""
CLOSE_S = 60.0
"""Seconds for the last report at the end of a run that failed."""


class StepReport:
    """Finishes steps, in their order: collects metrics, logs them, and frees the samples."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        calls: BlockingCalls,
        stages: VerlStages,
        publisher: WeightPublisher,
        meters: SampleMeters,
        bad_data: BadData,
        accounts: StepAccountant,
        observers: Observers,
        recorder: RunRecorder,
        gauges: RayGauges,
        trackers: Trackers,
        steps_per_epoch: int,
        rollout_data_dir: str | None,
        saves: Callable[[int], bool],
        pictures: KeptPictures | None = None,
    ) -> None:
        """`saves(step)`: whether a checkpoint is written after that step."""
        self._schedule, self._calls, self._stages, self._publisher = schedule, calls, stages, publisher
        self._meters, self._bad_data, self._accounts = meters, bad_data, accounts
        self._observers, self._recorder = observers, recorder
        self._gauges, self._trackers = gauges, trackers
        self._steps_per_epoch, self._rollout_data_dir = steps_per_epoch, rollout_data_dir
        self._saves, self._pictures = saves, pictures
        self._last_finish = time.perf_counter()
        self._rows_explained = False
        self._share: float | None = None
        self._logged = 0
        """The newest step with logged metrics."""
        self._reporting: asyncio.Task[None] | None = None
        """The report of the last step."""
        self._failed: asyncio.Future[None]
        """Gets the first error of a report."""

    def begin(self) -> None:
        """Start the clock of the first step. Call this on the event loop of the run."""
        self._last_finish = time.perf_counter()
        self._failed = asyncio.get_running_loop().create_future()

    async def finish(self, batch: StepBatch, facts: Mapping[str, float]) -> float | None:
        """Begin to log the metrics of a trained batch and to free its samples.

        Returns once the report of the step before is done. After the last step, and after one that is saved,
        returns once its own is done: a run that resumes from a checkpoint misses no metrics. Returns the
        share of the effective sample size in the newest report, once. Raises the error of a report.
        """
        now = time.perf_counter()
        step_s, self._last_finish = now - self._last_finish, now
        selected = self._observers.value(SELECTION, self._meters.selection, lost=LOST[SELECTION])
        found, warning = selected or ({}, None)
        if warning is not None:
            say(warning)
        found |= self._observers.value(ACCOUNT, self._accounts.take, lost=LOST[ACCOUNT]) or {}
        critical = self._observers.value(ACCOUNT, self._accounts.critical_role, lost=LOST[ACCOUNT]) or ""

        await self._reported()
        self._reporting = asyncio.create_task(
            self._calls(self._finish, batch, {**facts, **found}, step_s, critical),
            name=f"report[{batch.step}]",
        )
        self._reporting.add_done_callback(self._note_failure)
        if batch.step == self._schedule.last_step or self._saves(batch.step):
            await self._reported()
        share, self._share = self._share, None  # each report counts once
        return share

    async def watch(self) -> None:
        """Raise the error of a report as soon as it fails, even if no further step ends. Never returns."""
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Wait for the report of the last step, for at most CLOSE_S. Its error, if any, is not raised."""
        if self._reporting is not None:
            await asyncio.wait([self._reporting], timeout=CLOSE_S)
            self._reporting.cancel()
        if self._failed.done():
            self._failed.exception()  # mark it as retrieved
        await self._calls.without_deadline(self._trackers.close)

    def _note_failure(self, report: asyncio.Task[None]) -> None:
        if not report.cancelled() and (error := report.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _reported(self) -> None:
        if self._reporting is not None:
            # A cancelled lane must not abandon a report that is half written.
            await asyncio.shield(self._reporting)

    async def log_validation(self, version: int, metrics: dict[str, Any], seconds: float) -> None:
        """Log the metrics of a validated version."""
        metrics["async_pipeline/validation/version"] = version
        # A tracker may drop metrics of a step before the newest; the metric above has the version.
        await self._calls(self._trackers.log_metrics, metrics, max(version, self._logged))
        shown = {k: round(float(v), 4) for k, v in metrics.items() if k.startswith("val-core")}
        say(f"validation of version {version}: {shown} in {seconds:.1f} s{_failures(metrics)}")

    def _finish(self, batch: StepBatch, facts: dict[str, float], step_s: float, critical: str) -> None:
        timing = {**batch.timing_s, "step": step_s}
        metrics = {**batch.metrics, **self._pipeline_metrics(batch, facts)}
        view, observers = self._stages.at(batch.step), self._observers
        observers.value(
            "verl's metrics",
            view._compute_metrics,
            own_copy(batch.payload),
            metrics,
            timing,
            global_steps=batch.step,
            epoch=(batch.step - 1) // self._steps_per_epoch,
            lost="without verl's metrics of a batch",
        )
        if self._rollout_data_dir:
            observers.value(
                "trainer.rollout_data_dir",
                log_rollout_data,
                view,
                batch,
                timing,
                self._rollout_data_dir,
                lost="without further generations in that folder",
                attempts=FILE_ATTEMPTS,
            )
        if self._pictures is not None:
            observers.value(
                "the pictures of steps",
                self._pictures.keep,
                batch,
                lost="without further ones",
                attempts=FILE_ATTEMPTS,
            )
        tq.kv_clear(keys=batch.payload.keys, partition_id=batch.payload.partition_id)

        self._show(batch, facts, metrics, step_s, critical)
        observers.value(
            "Ray's metrics", self._gauges.show, metrics, lost="without gauges", attempts=FILE_ATTEMPTS
        )
        self._logged = batch.step
        self._trackers.log_metrics(metrics, batch.step)

    def _pipeline_metrics(self, batch: StepBatch, facts: Mapping[str, float]) -> dict[str, Any]:
        found: dict[str, Any] = {**facts, **self._bad_data.metrics(), **metrics_of(batch.groups)}
        found |= metrics_by_source(batch.groups)
        found["sample_store/rows"] = float(self._meters.stored() + batch.num_trajectories)
        found["observers/off"] = float(len(self._observers.off))
        rows = None if self._rows_explained else explain_rows(found)
        if rows is not None:
            self._rows_explained = True
            say(f"step {batch.step}: {rows}")
        served = self._publisher.rollout_pool.versions
        found["version/replicas"] = len(served)
        if len(served) <= SHOWN_REPLICAS:
            found |= {f"version/{name.replace(' ', '_')}": version for name, version in served.items()}

        for name, version in (
            ("old_logp", self._schedule.old_policy(batch.step)),
            ("ref_logp", self._schedule.reference(batch.step)),
        ):
            if version is not None:
                found[f"version/{name}"] = version
        distances = self._observers.value(OFF_POLICY, self._meters.distances, batch, lost=LOST[OFF_POLICY])
        measured, drift = distances or ({}, None)
        if drift is not None:
            say(f"step {batch.step}: {drift}")
        found |= measured
        self._share = measured.get(self._meters.share)
        return {f"async_pipeline/{name}": value for name, value in found.items()} | self._publisher.metrics()

    def _show(
        self,
        batch: StepBatch,
        facts: Mapping[str, float],
        metrics: Mapping[str, Any],
        step_s: float,
        critical: str,
    ) -> None:
        skipped = skipped_update(batch.metrics)
        if skipped and is_round(int(facts["train/skipped_updates"])):
            say(
                f"the update of step {batch.step} was skipped, or that of a mini-batch: {skipped}; "
                f"{facts['train/skipped_updates']:.0f} such steps so far"
            )
        trajectories = [t for g in batch.groups for t in g.trajectories]
        reward = sum(t.reward or 0.0 for t in trajectories) / len(trajectories)
        kl = metrics.get("rollout_corr/kl")
        self._recorder.record(reward, step_s, None if kl is None else float(kl), time.time())

        row = StepRow(
            step=batch.step,
            last_step=self._schedule.last_step,
            reward=reward,
            tokens=sum(t.num_tokens for t in trajectories) / len(trajectories),
            lag_mean=facts["lag/mean"],
            lag_max=facts["lag/max"],
            served=facts["version/served_min"],
            kl=float("nan") if kl is None else float(kl),
            train_s=batch.timing_s.get("update_actor", 0.0),
            step_s=step_s,
            samples=len(trajectories),
        )
        echo(row.render())
        waiting = {"untrained": facts["queue/untrained"], "finished": facts["queue/finished"]}
        echo(progress(row, **waiting, critical=critical))


def _failures(metrics: Mapping[str, Any]) -> str:
    """Return how many episodes of a validation failed, as the rest of a line; empty without any."""
    prefix = "async_pipeline/validation/agentic"
    failed = {end: int(metrics.get(f"{prefix}/end/{end}", 0)) for end in FAILURES}
    counts = ", ".join(f"{count} {end}" for end, count in failed.items() if count)
    return f"; of {metrics[f'{prefix}/episodes']:.0f} episodes failed: {counts}" if counts else ""
