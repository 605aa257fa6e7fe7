# SPDX-License-Identifier: Apache-2.0
"""The trainers of the strategies, which verl looks up by name. Imports verl (seconds).

Each names its schedule, and nothing else. A trainer of your own is one more subclass:
`+async_strategy=my_module:MyTrainer`.
"""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import register_trainer

from ...checkpoint import owner
from ...checkpoint.resume import root_of, saves
from ...config.knobs.schema import is_strategy
from ...core.schedule import Schedule
from ...errors import ConfigError
from ...redaction import hide_in_output
from ...strategies import FullyAsync, NStepAhead, OneStepOff, OnPolicy, load_class
from ..launch.ray_cluster import require_run_dir
from ..launch.run_config import runtime_of
from ..rollout.server_manager import PipelineServerManager
from .batches import advantages  # noqa: F401  registers its estimator with verl
from .reporting.terminal import say
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

for _name, _trainer in TRAINERS.items():
    register_trainer(_name)(_trainer)


def begin(config: DictConfig) -> None:
    """Prepare the trainer's process, before verl starts workers from it.

    Registers a strategy named `module:Class` and starts the rollout servers while verl starts the training
    workers. Hides secrets in the output of this process: verl prints its whole config, and Ray stores it in
    files that other users may read. Returns immediately for one of verl's trainers.

    Raises ConfigError if this process does not see the run directory of the driver, or if another run has it.
    """
    mode = str(config.trainer.v1.trainer_mode)
    if is_strategy(mode):
        hide_in_output()
        runtime = runtime_of(config)
        require_run_dir(runtime.run_dir, runtime.run_dir_mark)
        owner.hold(owner.RUN_DIR, runtime.run_dir, owner.TRAINER, say)
        if saves(config):
            owner.hold(owner.ROOT, root_of(config), owner.TRAINER, say)
        ensure_registered(mode)
        PipelineServerManager.start_early(config)


def ensure_registered(name: str) -> None:
    """Register the strategy `module:Class`, a schedule or a trainer, unless the table contains it.

    Raises ConfigError if it cannot be imported or is neither.
    """
    if name in TRAINERS:
        return
    cls = load_class(name)
    if issubclass(cls, Schedule):
        cls = VerlTrainer
    elif not issubclass(cls, VerlTrainer):
        raise ConfigError(
            f"strategy {name} must subclass recipe.async_pipeline.strategies.Schedule or the trainer "
            f"{VerlTrainer.__module__}.{VerlTrainer.__name__}; got neither"
        )
    register_trainer(name)(cls)
