# SPDX-License-Identifier: Apache-2.0
"""The stages: eight, another with a teacher, and two with a critic. Importing this package registers them."""

from .batches import (
    CriticStateMachine,
    LogPStateMachine,
    RefLogPStateMachine,
    RewardStateMachine,
    ValuesStateMachine,
)
from .groups import (
    DataloaderStateMachine,
    GenerateStateMachine,
    RolloutStateMachine,
    TeacherStateMachine,
)
from .param_update import ParamUpdateStateMachine
from .train import TrainStateMachine

__all__ = [
    "CriticStateMachine",
    "DataloaderStateMachine",
    "GenerateStateMachine",
    "LogPStateMachine",
    "ParamUpdateStateMachine",
    "RefLogPStateMachine",
    "RewardStateMachine",
    "RolloutStateMachine",
    "TeacherStateMachine",
    "TrainStateMachine",
    "ValuesStateMachine",
]
