# SPDX-License-Identifier: Apache-2.0
"""async_pipeline: verl's reinforcement-learning post-training as an asynchronous pipeline.

Eight stages, each a state machine with its own produce/consume loop, joined by bounded channels:

    dataloader ─► generate ─► rollout ─► logp, ref_logp ─► reward ─► train ─► param_update
        ▲                                                                        │
        └──── admission: how far generation may run ahead (max_lag) ◄── served ──┘

Decisions, without verl, Ray or torch:

    core/          state machine, channels, leases, schedule, versions, ledger, the flow
    stages/        the stages, by what they work on: groups, batches, versions; custom stages
    strategies/    on_policy, one_step_off, n_step_ahead, fully_async
    agents/        episodes of agents: their ends, environments, and where these run
    gateway/       agents that speak HTTP: sessions, chains of tokens, dialects
    config/        the keys that users set, and their validation

Work on files and memory, without verl or Ray:

    checkpoint/    what a run saves and resumes from
    weight_sync/   host arenas, manifests, publishing, and verification of every weight update
    installed/     the verl and the engines of this machine, and whether they are the tested ones

Execution on verl and Ray, the only importer of both:

    verl_bridge/   launch, and trainer/ agent_loop/ rollout/ workers/ reward/

Around a run:

    observe/       what a run writes: event log, accounting of device-seconds, metrics
    cli/           the command `async-pipeline`, and its subcommands for a run

Two storeys above, which no run imports:

    tools/         before and after a run: explain/ plan/ (simulator, planner) report/ translate/, the doctor,
                   patches/ (on verl) contract/ (what this package uses of verl and the engines)
    lab/           what measures and proves: bench/ soak/ gpu_kit/, and tasks/ that two CPU cores learn

Importing this package loads neither torch nor verl nor Ray.
"""

from . import stages as _stages  # registers the eight stages
from .config.knobs.schema import AsyncPipelineConfig
from .core.flow import AsyncTrainingFlow, FlowResult
from .core.stage import RoleStateMachine, create_role_state_machine, known_roles, register_role
from .core.state_machine import TRANSITIONS, Event, StageState
from .core.trainer_protocol import PipelineTrainer

__version__ = "0.2.0"
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
