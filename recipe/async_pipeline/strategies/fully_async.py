# SPDX-License-Identifier: Apache-2.0
"""fully_async: groups stream through the message queue and are trained as they are finished. Lag at most
max_lag.
"""

from __future__ import annotations

from typing import ClassVar

from ..core.message_queue import Order
from ..verl_bridge.trainer.async_trainer import AsyncPipelineTrainer


class FullyAsyncTrainer(AsyncPipelineTrainer):
    """No batch waits for its longest answer; a step only waits for an answer that would get too old.

    In the words of rLLM's fully asynchronous trainer: the rollout executor is the role `generate`, the
    message
    queue is `core.message_queue`, the trainer `train`, and parameter sync `param_update`.
    """

    strategy = "fully_async"
    order: ClassVar[Order] = "finished"
