# SPDX-License-Identifier: Apache-2.0
"""Report each step: all metrics to the trackers, and one line to the user."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import transfer_queue as tq

from ...core.bad_data import BadData
from ...core.items import StepBatch
from ...core.schedule import Schedule
from ...observe.step_account import StepAccountant
from ...observe.summary import RunRecorder
from ...observe.table import StepRow, progress
from .calls import BlockingCalls
from .ray_metrics import RayGauges
from .sample_metrics import SampleMeters
from .terminal import echo, say
from .verl_stages import VerlStages, own_copy
from .weight_publisher import WeightPublisher

SHOWN_REPLICAS = 16
"""Maximum number of replicas for which each replica's served version is a metric."""


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
        recorder: RunRecorder,
        gauges: RayGauges,
        logger: Any,
        steps_per_epoch: int,
        rollout_data_dir: str | None,
    ) -> None:
        self._schedule, self._calls, self._stages, self._publisher = schedule, calls, stages, publisher
        self._meters, self._bad_data, self._accounts = meters, bad_data, accounts
        self._recorder, self._gauges, self._logger = recorder, gauges, logger
        self._steps_per_epoch, self._rollout_data_dir = steps_per_epoch, rollout_data_dir
        self._last_finish = time.perf_counter()
        self._logged = 0
        """The newest step with logged metrics."""

    def begin(self) -> None:
        """Start the clock of the first step."""
        self._last_finish = time.perf_counter()

    async def finish(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        """Log the metrics of a trained batch and free its samples."""
        now = time.perf_counter()
        step_s, self._last_finish = now - self._last_finish, now
        found, warning = self._meters.selection()
        if warning is not None:
            say(warning)
        found |= self._accounts.take()
        critical = self._accounts.critical_role()
        await self._calls(self._finish, batch, {**facts, **found}, step_s, critical)

    async def log_validation(self, version: int, metrics: dict[str, Any], seconds: float) -> None:
        """Log the metrics of a validated version."""
        metrics["async_pipeline/validation/version"] = version
        # A tracker may drop metrics of a step before the newest; the metric above has the version.
        await self._calls(self._logger.log, data=metrics, step=max(version, self._logged))
        shown = {k: round(float(v), 4) for k, v in metrics.items() if k.startswith("val-core")}
        say(f"validation of version {version}: {shown} in {seconds:.1f} s")

    def _finish(self, batch: StepBatch, facts: dict[str, float], step_s: float, critical: str) -> None:
        timing = {**batch.timing_s, "step": step_s}
        metrics = {**batch.metrics, **self._pipeline_metrics(batch, facts)}
        view = self._stages.at(batch.step)
        view._compute_metrics(
            own_copy(batch.payload),
            metrics,
            timing,
            global_steps=batch.step,
            epoch=(batch.step - 1) // self._steps_per_epoch,
        )
        if self._rollout_data_dir:
            view._log_rollout_data(own_copy(batch.payload), timing, self._rollout_data_dir)
        tq.kv_clear(keys=batch.payload.keys, partition_id=batch.payload.partition_id)

        self._show(batch, facts, metrics, step_s, critical)
        self._gauges.show(metrics)
        self._logged = batch.step
        self._logger.log(data=metrics, step=batch.step)

    def _pipeline_metrics(self, batch: StepBatch, facts: Mapping[str, float]) -> dict[str, Any]:
        found: dict[str, Any] = {**facts, **self._bad_data.metrics()}
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
        found |= self._meters.distances(batch)
        return {f"async_pipeline/{name}": value for name, value in found.items()} | self._publisher.metrics()

    def _show(
        self,
        batch: StepBatch,
        facts: Mapping[str, float],
        metrics: Mapping[str, Any],
        step_s: float,
        critical: str,
    ) -> None:
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
