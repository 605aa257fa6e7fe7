# SPDX-License-Identifier: Apache-2.0
"""Run verl's stages on one batch: in a thread, as of the batch's step, on a copy of its metadata."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from omegaconf import open_dict
from transfer_queue import KVBatchMeta

from ....core.groups.items import StepBatch
from ...calls.ray_calls import BlockingCalls
from ...store.sample_columns import trained_columns
from ...workers.update_log_probs import CORRECTION


class KlControl:
    """The KL controller of verl after each of the newest steps, which are taken in their order.

    Batches of later steps pass the reward stage while an earlier step trains, or while its checkpoint is
    written. A single controller would already contain their updates.
    """

    def __init__(self, controller: Any, step: int) -> None:
        """Start with the state after `step`; `controller` is verl's, with a `value`."""
        self._after = {step: controller}

    def before(self, step: int) -> Any:
        """Return a controller that `step` may advance."""
        return copy.copy(self._after[step - 1])

    def advanced(self, step: int, controller: Any) -> None:
        """Keep the state after `step`."""
        self._after[step] = controller

    def value_after(self, step: int) -> float:
        """Return the coefficient after `step`."""
        return float(self._after[step].value)

    def forget_before(self, step: int) -> None:
        """Forget the states after steps that were trained before `step`."""
        self._after = {s: controller for s, controller in self._after.items() if s >= step}


class VerlStages:
    """Runs methods of verl's trainer for a step.

    These methods read attributes of their trainer that belong to a step (`global_steps`, the KL controller).
    Several steps are in the pipeline at once, so each call gets a view of the trainer with the values of its
    step; the attributes of the trainer itself are never written.
    """

    def __init__(self, trainer: Any, calls: BlockingCalls, old_logp: str) -> None:
        self._trainer, self._calls = trainer, calls
        self._kl: KlControl | None = None
        self._correction: dict[str, Any] | None = None
        """verl's correction, where the update applies it."""
        self._config = trainer.config
        """The config of reward and train."""
        if old_logp == "update":
            self._correction = dict(trainer.config.algorithm.get("rollout_correction") or {})
            prompts = trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size
            self._rows_of_update = int(prompts * trainer.config.actor_rollout_ref.rollout.n)
            self._config = copy.deepcopy(trainer.config)
            with open_dict(self._config):
                self._config.algorithm.rollout_correction = None
                self._config.actor_rollout_ref.actor.calculate_entropy = True

    @property
    def workers(self) -> Any:
        """Return the workers that train the policy."""
        return self._trainer.actor_rollout_wg

    def start(self, step: int) -> None:
        """Take the state after `step` from the trainer. Call this after loading a checkpoint."""
        controller = getattr(self._trainer, "kl_ctrl_in_reward", None)
        self._kl = None if controller is None else KlControl(controller, step)

    def at(self, step: int) -> Any:
        """Return a view of verl's trainer for which the current step is `step`."""
        view = copy.copy(self._trainer)
        view.global_steps = step
        return view

    def kl_coefficient(self, step: int) -> float | None:
        """Return the KL coefficient after `step`, or None if the run has none."""
        return None if self._kl is None else self._kl.value_after(step)

    async def run(self, batch: StepBatch, stage: Callable[..., Any], timer: str) -> StepBatch:
        """Run `stage(meta, metrics=...)` and return the batch with its metrics and its seconds."""
        metrics: dict[str, Any] = {}
        started = time.perf_counter()

        @wraps(stage)
        def on_copy() -> Any:
            # In the thread: thousands of tags hold up the event loop for 0.1 s.
            return stage(own_copy(batch.payload), metrics=metrics)

        await self._calls(on_copy)
        return batch.with_results(metrics=metrics, **{timer: time.perf_counter() - started})

    async def run_on_workers(self, batch: StepBatch, stage: Callable[..., Any], timer: str) -> StepBatch:
        """Run a stage like `run`, but let the training workers fetch only the columns that they need."""

        @wraps(stage)
        def with_columns(meta: KVBatchMeta, metrics: dict[str, Any]) -> Any:
            meta.fields = trained_columns(meta, pictures=self._trainer.processor is not None)
            return stage(meta, metrics=metrics)

        return await self.run(batch, with_columns, timer)

    def is_one_update(self, batch: StepBatch) -> bool:
        """Return whether the log-probs of a batch come from its update: it is the only one of the step."""
        return self._correction is not None and len(batch.payload) <= self._rows_of_update

    async def values(self, batch: StepBatch) -> StepBatch:
        return await self.run_on_workers(batch, self.at(batch.step)._compute_values, "values")

    async def update_critic(self, batch: StepBatch) -> StepBatch:
        return await self.run_on_workers(batch, self.at(batch.step)._update_critic, "update_critic")

    async def update_actor(self, batch: StepBatch) -> StepBatch:
        if self._kl is not None:
            self._kl.forget_before(batch.step)
        view = self.at(batch.step)
        view.config = self._config

        @wraps(view._update_actor)
        def update(meta: KVBatchMeta, metrics: dict[str, Any]) -> Any:
            if self.is_one_update(batch):
                meta.extra_info[CORRECTION] = self._correction
            return view._update_actor(meta, metrics=metrics)

        return await self.run_on_workers(batch, update, "update_actor")

    async def advantages(self, batch: StepBatch) -> StepBatch:
        """Compute advantages, with the KL coefficient after the previous step."""
        view = self.at(batch.step)
        view.config = self._config
        if self._kl is not None:
            view.kl_ctrl_in_reward = self._kl.before(batch.step)
        done = await self.run(batch, view._compute_advantage, "adv")
        if self._kl is not None:
            self._kl.advanced(batch.step, view.kl_ctrl_in_reward)
        return done

    async def balance(self, step: int, meta: KVBatchMeta) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return a batch that is balanced over the training ranks and padded for `step`, and its metrics."""
        metrics: dict[str, Any] = {}
        return await self._calls(self.at(step)._balance_batch, meta, metrics=metrics), metrics


def own_copy(meta: KVBatchMeta) -> KVBatchMeta:
    """Return a copy for one stage: verl's stages write into `extra_info` and reorder in place."""
    return KVBatchMeta(
        partition_id=meta.partition_id,
        keys=list(meta.keys),
        tags=[dict(tag) for tag in meta.tags],
        extra_info=dict(meta.extra_info or {}),
    )
