# SPDX-License-Identifier: Apache-2.0
"""The eight roles, one file each. Importing this package registers them."""

from .dataloader import DataloaderStateMachine
from .generate import GenerateStateMachine
from .logp import LogPStateMachine
from .param_update import ParamUpdateStateMachine
from .ref_logp import RefLogPStateMachine
from .reward import RewardStateMachine
from .rollout import RolloutStateMachine
from .train import TrainStateMachine

__all__ = [
    "DataloaderStateMachine",
    "GenerateStateMachine",
    "LogPStateMachine",
    "ParamUpdateStateMachine",
    "RefLogPStateMachine",
    "RewardStateMachine",
    "RolloutStateMachine",
    "TrainStateMachine",
]
