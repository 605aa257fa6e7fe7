# SPDX-License-Identifier: Apache-2.0
"""What is told of the samples of each step: how old, how far off-policy, and whether they are like all
that were made.
"""

from __future__ import annotations

from collections.abc import Iterable

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf

from ...core.items import StepBatch, Trajectory
from ...observe.off_policy import TrajectoryVersions, off_policy_metrics
from ...observe.selection_bias import Fate, SelectionMeter


class SampleMeters:
    """The meters of a run. All but `distances` belong to the event loop."""

    def __init__(self, config: DictConfig, max_lag: int) -> None:
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self._max_lag = max_lag
        self._clip_low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
        self._clip_high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
        self._answers = int(rollout.n)
        self._sampled = ["rollout_log_probs"] if rollout.calculate_log_probs else []
        self._bypassed = bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"))
        self._selection = SelectionMeter()

    def meet(self, fate: Fate, trajectories: Iterable[Trajectory]) -> None:
        """Each of these met `fate`."""
        for one in trajectories:
            self._selection.record(
                fate, tokens=one.num_tokens, turns=one.turns, seconds=one.seconds, reward=one.reward
            )

    def give_up(self, seconds: float) -> None:
        """The answers to one prompt were given up, so long after they were asked for; no more is known of
        them.
        """
        for _ in range(self._answers):
            self._selection.record("dropped", seconds=seconds)

    def trained(self, batch: StepBatch) -> tuple[dict[str, float], str | None]:
        """Metrics of all samples so far, and a warning if those trained have become unlike them."""
        self.meet("trained", (one for group in batch.groups for one in group.trajectories))
        return self._selection.metrics(), self._selection.warning()

    def distances(self, batch: StepBatch) -> dict[str, float]:
        """How far the policies that wrote the batch are from the one that it trains. Blocks on the sample
        store.
        """
        trajectories = {t.key: t for group in batch.groups for t in group.trajectories}
        # verl adds rows so that a batch divides over its ranks.
        keys = [key for key in batch.payload.keys if key in trajectories]
        names = ["loss_mask", "old_log_probs", *self._sampled]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.payload.partition_id, select_fields=names)
        rows = {name: [row.float().numpy() for row in data[name].unbind()] for name in names}
        return off_policy_metrics(
            [
                TrajectoryVersions(first=t.first_version, last=t.last_version, spans=t.spans)
                for t in (trajectories[key] for key in keys)
            ],
            trainer_version=batch.step - 1,
            max_lag=self._max_lag,
            mask=rows["loss_mask"],
            rollout_log_probs=rows.get("rollout_log_probs"),
            # Then both columns are one, and every ratio is 1.
            old_log_probs=None if self._bypassed else rows["old_log_probs"],
            clip_low=self._clip_low,
            clip_high=self._clip_high,
        )
