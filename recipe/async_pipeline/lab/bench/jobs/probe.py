# SPDX-License-Identifier: Apache-2.0
"""Time the stages of any trainer, and set the polling interval of verl's trainers."""

from __future__ import annotations

import json
import os
import time
from itertools import count
from typing import Any

import verl.trainer.ppo.v1 as verl_v1
from verl.trainer.main_ppo import TaskRunnerV1

from ....verl_bridge.trainer.verl_trainer import VerlTrainer
from ....weight_sync.memory.manifest import WeightTicket
from ..inputs.waits import LognormalWait
from ..measuring.spans import POLL_S, REFERENCE, SpanFile, of_this_job

_StockRunner: Any = TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__
"""The plain class of verl's actor class, which Ray forbids to inherit from."""


def probed(trainer: Any, spans: SpanFile, poll_s: float | None) -> Any:
    """Return a subclass of a trainer that writes a span for each stage.

    `poll_s` replaces the polling interval of verl's replay buffer unless it is None.
    """
    described = json.loads(os.environ.get(REFERENCE) or "null")
    waits = None if described is None else (described["seed"], LognormalWait(**described["wait"]))

    class Probed(trainer):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            # Shared by the views of the trainer that its stages run on.
            self._references = count(1)
            if poll_s is not None:
                self.replay_buffer.poll_interval = poll_s

        def _compute_old_log_prob(self, batch: Any, metrics: Any) -> Any:
            with spans.measure("old_log_prob"):
                return super()._compute_old_log_prob(batch, metrics=metrics)

        def _compute_ref_log_prob(self, batch: Any, metrics: Any) -> Any:
            # On separate devices it is not work of the training devices.
            pool_of = self.pipeline.pool_of if isinstance(self, VerlTrainer) else lambda role: None
            separate = pool_of("ref_logp") != pool_of("train")
            with spans.measure("ref_log_prob_apart" if separate else "ref_log_prob"):
                if waits is not None:
                    time.sleep(waits[1].draw(waits[0], "reference", next(self._references)))
                return super()._compute_ref_log_prob(batch, metrics=metrics)

        def _compute_advantage(self, batch: Any, metrics: Any) -> Any:
            with spans.measure("advantage"):
                return super()._compute_advantage(batch, metrics=metrics)

        def _update_actor(self, batch: Any, metrics: Any) -> Any:
            # Version v is the result of v optimizer steps, so step s starts with version s - 1.
            tags = [tag for tag in batch.tags if not tag.get("is_padding")]
            lags = [self.global_steps - 1 - int(tag["min_global_steps"]) for tag in tags]
            with spans.measure("update_actor", step=self.global_steps, samples=len(tags), lags=lags):
                return super()._update_actor(batch, metrics=metrics)

        def on_sample_end(self) -> None:
            """Note the start of a pause of engines that share devices with training."""
            self._paused_since = time.monotonic()
            with spans.measure("sync"):
                super().on_sample_end()

        def on_step_end(self) -> None:
            """Record spans of verl's weight update."""
            started = time.monotonic()
            with spans.measure("sync"), spans.measure("weights"):
                super().on_step_end()
            # Engines on the training devices pause from the end of sampling; others only for the update.
            separate = self.config.trainer.v1.trainer_mode == "separate_async"
            spans.add("paused", started if separate else self._paused_since)

    return Probed


def probed_pipeline(trainer: Any, spans: SpanFile) -> Any:
    """Return a probed subclass of the pipeline's trainer.

    Only the gather blocks the training devices, and only the load pauses a replica.
    """

    class ProbedRun(trainer.run_class):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._gathering: dict[int, float] = {}

        async def gather(self, version: int) -> WeightTicket:
            self._gathering[version] = time.monotonic()
            with spans.measure("sync"):
                ticket: WeightTicket = await super().gather(version)
            return ticket

        async def publish(self, version: int, snapshot: object) -> Any:
            began = self._gathering.pop(version)
            publication = await super().publish(version, snapshot)
            ended = time.monotonic()
            spans.add("weights", began, ended)
            # The load is the last part. Replicas load in turn, so each pauses for its share on average.
            spans.add("paused", ended - publication.stall_s / publication.replicas, ended)
            return publication

    class ProbedPipeline(probed(trainer, spans, None)):  # type: ignore[misc]
        run_class = ProbedRun

    return ProbedPipeline


class ProbedTaskRunner(_StockRunner):  # type: ignore[misc]
    """verl's task runner with a probed trainer."""

    def run(self, config: Any) -> None:
        """Run verl's task with the probed trainer. Raises KeyError outside of a benchmark."""
        if config.actor_rollout_ref.rollout.name == "sglang":
            from .weight_updates.sglang_replicas import use_verls

            use_verls()
        spans = of_this_job()
        poll_s = float(os.environ[POLL_S])
        stock_lookup = verl_v1.get_trainer_cls

        def lookup(mode: str) -> Any:
            trainer = stock_lookup(mode)
            if issubclass(trainer, VerlTrainer):
                return probed_pipeline(trainer, spans)
            return probed(trainer, spans, poll_s)

        verl_v1.get_trainer_cls = lookup
        super().run(config)
