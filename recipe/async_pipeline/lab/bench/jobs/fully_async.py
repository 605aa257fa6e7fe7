# SPDX-License-Identifier: Apache-2.0
"""Time the stages of verl's `experimental/fully_async_policy`, as `probe` does for the other trainers."""

from __future__ import annotations

from typing import Any

import ray
from verl.experimental.fully_async_policy import fully_async_main as stock
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer

from ..measuring.spans import of_this_job

StockTrainer: Any = FullyAsyncTrainer.__ray_metadata__.modified_class
StockRunner: Any = stock.FullyAsyncTaskRunner.__ray_metadata__.modified_class
"""The plain classes of verl's actor classes, which Ray forbids to inherit from."""


class ProbedFullyAsyncTrainer(StockTrainer):  # type: ignore[misc]
    """Writes a span for each of its stages."""

    def _fit_compute_log_prob(self, batch: Any) -> Any:
        with of_this_job().measure("old_log_prob"):
            return super()._fit_compute_log_prob(batch)

    def _fit_compute_advantage(self, batch: Any) -> Any:
        with of_this_job().measure("advantage"):
            return super()._fit_compute_advantage(batch)

    def _fit_update_actor(self, batch: Any) -> Any:
        lags = [
            self.current_param_version - int(first) for first in batch.non_tensor_batch["min_global_steps"]
        ]
        with of_this_job().measure("update_actor", step=self.global_steps, samples=len(lags), lags=lags):
            return super()._fit_update_actor(batch)

    async def _fit_update_weights(self) -> Any:
        spans = of_this_job()
        with spans.measure("sync"), spans.measure("weights"), spans.measure("paused"):
            return await super()._fit_update_weights()


class ProbedFullyAsyncRunner(StockRunner):  # type: ignore[misc]
    """verl's task runner with the probed trainer."""

    def run(self, config: Any) -> None:
        """Run verl's task with the probed trainer."""
        stock.FullyAsyncTrainer = ray.remote(num_cpus=10)(ProbedFullyAsyncTrainer)
        super().run(config)
