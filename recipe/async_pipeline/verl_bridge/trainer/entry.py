# SPDX-License-Identifier: Apache-2.0
"""The trainer that `trainer.v1.trainer_mode=async_pipeline` names in a verl without our patches.

It is registered in every process that imports verl's trainers, so it imports nothing else.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls, register_trainer

from ...config.paths import PATCH_FREE


class PatchFreeEntry(PPOTrainer):
    """Prepares the config of a run that verl has started, and makes the trainer of its strategy."""

    def __new__(cls, config: DictConfig) -> Any:
        """Return a trainer, which is not of this class.

        Changes `config` in place, because verl reads more of the run's settings from it later. Raises
        ConfigError or PatchedVerlRequired, after one line about the cause, if the run cannot start.
        """
        from .. import hooks

        hooks.adopt(config)
        return get_trainer_cls(str(config.trainer.v1.trainer_mode))(config=config)


def register() -> None:
    """Register the trainer with verl. Idempotent."""
    register_trainer(PATCH_FREE)(PatchFreeEntry)
