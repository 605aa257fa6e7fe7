# SPDX-License-Identifier: Apache-2.0
"""Record the steps of an engine, inside SGLang's scheduler process."""

from __future__ import annotations

import os
from typing import Any

from .....verl_bridge.rollout.sglang import scheduler as children
from ...measuring.spans import of_this_job
from ...measuring.stalls import STEP


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Run a scheduler that writes a span for each step, until its process ends."""
    from sglang.srt.managers import scheduler

    scheduler.Scheduler = timed_scheduler(scheduler.Scheduler)
    children.run_scheduler_process(*args, **kwargs)


def timed_scheduler(scheduler_class: Any) -> Any:
    """Return SGLang's scheduler class, which writes a span for each step of the engine."""

    class TimedScheduler(scheduler_class):  # type: ignore[misc]
        def run_batch(self, *args: Any, **kwargs: Any) -> Any:
            # The ranks of one engine make the same steps.
            if self.tp_cpu_group.rank():
                return super().run_batch(*args, **kwargs)
            with of_this_job().measure(STEP, pid=os.getpid()):
                return super().run_batch(*args, **kwargs)

    return TimedScheduler
