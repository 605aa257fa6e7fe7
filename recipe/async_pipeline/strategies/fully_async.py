# SPDX-License-Identifier: Apache-2.0
"""fully_async: groups are trained in the order in which they finish. Lag at most max_lag."""

from __future__ import annotations

from typing import ClassVar

from ..core.groups.untrained_groups import Order
from ..core.schedule import Schedule


class FullyAsync(Schedule):
    """No batch waits for its longest response; a step waits only for one that would get too old.

    In the terms of rLLM's fully asynchronous trainer: its rollout executor is the stage `generate`, its
    message queue `core.groups.message_queue`, its trainer `train` and its parameter sync `param_update`.
    """

    order: ClassVar[Order] = "finished"
