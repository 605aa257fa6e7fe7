# SPDX-License-Identifier: Apache-2.0
"""one_step_off: batch s+1 is generated while step s trains. Lag at most 1."""

from __future__ import annotations

from ..verl_bridge.trainer.async_trainer import AsyncPipelineTrainer


class OneStepOffTrainer(AsyncPipelineTrainer):
    """Generation of one batch and training of the one before go on side by side; the first batch has lag 0.

    Source of the scheme: Noukhovitch et al., "Asynchronous RLHF", arXiv 2410.18252.
    """

    strategy = "one_step_off"
