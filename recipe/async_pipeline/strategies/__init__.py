# SPDX-License-Identifier: Apache-2.0
"""Strategies: how far generation may run ahead of training, and in which order groups train.

A strategy is a `Schedule`. To add one here, write a class and a line in `STRATEGIES`; to bring your own, name
it `module:Class`. A class that also changes how the trainer works subclasses verl_bridge's
`VerlTrainer` and names its schedule in `schedule_class`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from ..core.schedule import Schedule
from ..errors import ConfigError
from .schedules import FullyAsync, NStepAhead, OneStepOff, OnPolicy

STRATEGIES: Mapping[str, type[Schedule]] = {
    "on_policy": OnPolicy,
    "one_step_off": OneStepOff,
    "n_step_ahead": NStepAhead,
    "fully_async": FullyAsync,
}


def load_class(strategy: str) -> type:
    """Return the class that a strategy names: one of the table, or that of `module:Class`.

    Raises ConfigError if it cannot be imported or is not a class.
    """
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    module, _, attribute = strategy.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"strategy {strategy} cannot be imported ({error}); write module:Class") from error
    if not isinstance(found, type):
        raise ConfigError(f"strategy {strategy} must be a class, got {type(found).__name__}; name a class")
    return found


def schedule_class(strategy: str) -> type[Schedule]:
    """Return the schedule of a strategy, also if the strategy is a trainer that names one.

    Raises ConfigError if it cannot be imported or is neither.
    """
    found = load_class(strategy)
    schedule = found if issubclass(found, Schedule) else getattr(found, "schedule_class", None)
    if not (isinstance(schedule, type) and issubclass(schedule, Schedule)):
        raise ConfigError(
            f"strategy {strategy} must subclass recipe.async_pipeline.strategies.Schedule, got a class "
            "without a schedule; see docs/strategies.md"
        )
    return schedule


__all__ = [
    "STRATEGIES",
    "FullyAsync",
    "NStepAhead",
    "OnPolicy",
    "OneStepOff",
    "Schedule",
    "load_class",
    "schedule_class",
]
