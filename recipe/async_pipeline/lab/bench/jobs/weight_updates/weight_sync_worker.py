# SPDX-License-Identifier: Apache-2.0
"""Record the steps of an engine, inside vLLM's worker process."""

from __future__ import annotations

import os
from typing import Any

from .....verl_bridge.rollout.vllm.worker import PipelineWorkerExtension
from ...measuring.spans import of_this_job
from ...measuring.stalls import STEP


class TimedWorkerExtension(PipelineWorkerExtension):
    """Writes a span for each step of the engine."""

    def __new__(cls, **kwargs: Any) -> Any:
        # vLLM adds this class to the bases of its worker, so `cls` is the worker.
        worker: Any = cls
        spans, plain = of_this_job(), worker.execute_model

        def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            # The ranks of one engine make the same steps.
            if self.rank:
                return plain(self, *args, **kwargs)
            with spans.measure(STEP, pid=os.getpid()):
                return plain(self, *args, **kwargs)

        worker.execute_model = execute_model
        return super().__new__(cls, **kwargs)
