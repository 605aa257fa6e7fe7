# SPDX-License-Identifier: Apache-2.0
"""The stages, one file each: eight, and two more with a critic. Importing this package registers them."""

from .critic import CriticStateMachine
from .dataloader import DataloaderStateMachine
from .generate import GenerateStateMachine
from .logp import LogPStateMachine
from .param_update import ParamUpdateStateMachine
from .ref_logp import RefLogPStateMachine
from .reward import RewardStateMachine
from .rollout import RolloutStateMachine
from .train import TrainStateMachine
from .values import ValuesStateMachine

__all__ = [
    "CriticStateMachine",
    "DataloaderStateMachine",
    "GenerateStateMachine",
    "LogPStateMachine",
    "ParamUpdateStateMachine",
    "RefLogPStateMachine",
    "RewardStateMachine",
    "RolloutStateMachine",
    "TrainStateMachine",
    "ValuesStateMachine",
]
