# SPDX-License-Identifier: Apache-2.0
"""Trainer strategies, one file each: how far generation may run ahead of training.

Importing this package imports verl's trainer (seconds) and registers the strategies with it; verl's
entry point does so in the process that trains, and then calls `begin`.
"""

from __future__ import annotations

import importlib

from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import register_trainer

from ..config.schema import is_strategy
from ..errors import ConfigError
from ..redaction import hide_in_output
from ..verl_bridge.rollout.server_manager import PipelineServerManager
from ..verl_bridge.trainer.async_trainer import AsyncPipelineTrainer
from .fully_async import FullyAsyncTrainer
from .n_step_ahead import NStepAheadTrainer
from .on_policy import OnPolicyTrainer
from .one_step_off import OneStepOffTrainer

STRATEGIES: dict[str, type[AsyncPipelineTrainer]] = {
    "on_policy": OnPolicyTrainer,
    "one_step_off": OneStepOffTrainer,
    "n_step_ahead": NStepAheadTrainer,
    "fully_async": FullyAsyncTrainer,
}

for _name, _cls in STRATEGIES.items():
    register_trainer(_name)(_cls)


def begin(config: DictConfig) -> None:
    """Called by verl's entry point in the process that trains, before anything else is started.

    Registers a strategy of one's own, and has the rollout servers start while verl starts the rest. What verl
    prints from
    here on, its whole config among it, Ray keeps in files that others may read: it has no secrets.
    A stock trainer, into whose config our defaults were composed, is left alone.
    """
    mode = str(config.trainer.v1.trainer_mode)
    if is_strategy(mode):
        hide_in_output()
        ensure_registered(mode)
        PipelineServerManager.start_early(config)


def ensure_registered(name: str) -> None:
    """Register a strategy that lives elsewhere, named `module:Class`; ours are known already.

    Raises ConfigError: it cannot be imported, or is not an `AsyncPipelineTrainer`.
    """
    if ":" not in name:
        return
    module, _, attribute = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"strategy {name} cannot be imported ({error}); write module:Class") from error
    if not (isinstance(cls, type) and issubclass(cls, AsyncPipelineTrainer)):
        raise ConfigError(
            f"strategy {name} must subclass recipe.async_pipeline.strategies.AsyncPipelineTrainer"
        )
    register_trainer(name)(cls)


__all__ = [
    "STRATEGIES",
    "AsyncPipelineTrainer",
    "FullyAsyncTrainer",
    "NStepAheadTrainer",
    "OnPolicyTrainer",
    "OneStepOffTrainer",
    "begin",
    "ensure_registered",
]
