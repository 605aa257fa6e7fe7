# SPDX-License-Identifier: Apache-2.0
"""The trainers that verl finds by the names of the strategies. Each names its schedule, and nothing else.

A trainer of your own is one more subclass: `+async_strategy=my_module:MyTrainer`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...strategies import FullyAsync, NStepAhead, OneStepOff, OnPolicy
from .verl_trainer import VerlTrainer


class OnPolicyTrainer(VerlTrainer):
    """Generate batch s+1 with the weights of step s."""

    schedule_class = OnPolicy


class OneStepOffTrainer(VerlTrainer):
    """Generate batch s+1 while step s trains."""

    schedule_class = OneStepOff


class NStepAheadTrainer(VerlTrainer):
    """Generate up to `max_lag` batches ahead, and train them in the order of their prompts."""

    schedule_class = NStepAhead


class FullyAsyncTrainer(VerlTrainer):
    """Train groups in the order in which they finish."""

    schedule_class = FullyAsync


TRAINERS: Mapping[str, type[VerlTrainer]] = {
    "on_policy": OnPolicyTrainer,
    "one_step_off": OneStepOffTrainer,
    "n_step_ahead": NStepAheadTrainer,
    "fully_async": FullyAsyncTrainer,
}
"""The trainer of each strategy of `strategies.STRATEGIES`."""
