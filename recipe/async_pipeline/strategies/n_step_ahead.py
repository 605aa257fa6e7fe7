# SPDX-License-Identifier: Apache-2.0
"""n_step_ahead: up to n+1 batches are being generated while one trains. Lag at most n = max_lag."""

from __future__ import annotations

from ..verl_bridge.trainer.async_trainer import AsyncPipelineTrainer


class NStepAheadTrainer(AsyncPipelineTrainer):
    """While the longest answer of a batch is awaited, n later batches go on being generated.

    More than ceil(longest answer / step time) batches ahead only add staleness.
    """

    strategy = "n_step_ahead"
