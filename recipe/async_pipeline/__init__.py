# SPDX-License-Identifier: Apache-2.0
"""async_pipeline: verl's reinforcement-learning post-training as an asynchronous pipeline.

Eight roles, each a state machine with its own produce/consume loop, joined by bounded channels:

    dataloader ─► generate ─► rollout ─► logp, ref_logp ─► reward ─► train ─► param_update
        ▲                                                                        │
        └──── admission: how far generation may run ahead (max_lag) ◄── served ──┘

Where what lives:

    core/         decides: the state machine, channels, leases, versions, the flow. Pure asyncio.
    stages/       the eight roles, one file each
    strategies/   how far ahead: on_policy, one_step_off, n_step_ahead (subclasses of verl's trainer)
    weight_sync/  host arenas, manifests and the proof of delivery. No verl, no ray.
    verl_bridge/  acts: the only importer of verl and ray
    observe/      the event file, where device-seconds went, the trace, the report
    toy/          a task small enough to learn on two CPU cores

Importing this package loads neither torch nor verl nor ray.
"""

from . import stages as _stages  # registers the eight roles
from .config.schema import AsyncPipelineConfig
from .core.flow import AsyncTrainingFlow, FlowResult
from .core.role import RoleStateMachine, create_role_state_machine, known_roles, register_role
from .core.state_machine import TRANSITIONS, Event, StageState
from .core.trainer_protocol import PipelineTrainer

__version__ = "0.1.0"
__all__ = [
    "TRANSITIONS",
    "AsyncPipelineConfig",
    "AsyncTrainingFlow",
    "Event",
    "FlowResult",
    "PipelineTrainer",
    "RoleStateMachine",
    "StageState",
    "__version__",
    "create_role_state_machine",
    "known_roles",
    "register_role",
]
del _stages
