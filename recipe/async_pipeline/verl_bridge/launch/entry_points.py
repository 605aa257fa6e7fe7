# SPDX-License-Identifier: Apache-2.0
"""Runs that other entry points than verl's main_ppo start, which would ignore the switch.

Most of them call main_ppo's `run_ppo`. There the configuration of an entry point of
`config.keys.entry_points` is rewritten into main_ppo's, and main_ppo's task runner runs it; others are
refused. The rest calls verl's `validate_config`, which refuses a configuration that still has the switch:
main_ppo has removed it.
Importing this module loads neither torch, verl nor Ray.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...config.keys.entry_points import ENTRY_POINTS, EntryPoint, entry_of_runner
from ...config.keys.misplaced import SWITCHES
from ...config.paths import MODE, PATCH_FREE
from ...console import EXIT_USERS, echo
from ...errors import AsyncPipelineError, ConfigError
from ...observe.table import marked
from .. import hooks
from .run_config import apply_entry_point

OWN_RUNNER = "TaskRunnerV1"
"""The task runner of main_ppo, whose configuration `hooks.prepare` has rewritten if verl has our patches."""


_MODULES = f"verl.trainer.main_ppo or one of {', '.join(entry.module for entry in ENTRY_POINTS)}"


def of_any_entry_point(run_ppo: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run_ppo` of verl, which takes runs with the switch over from other entry points."""

    @functools.wraps(run_ppo)
    def run(config: DictConfig, task_runner_class: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_switch(config):
            task_runner_class = take_over(config, task_runner_class)
        return run_ppo(config, task_runner_class, *args, **kwargs)

    return run


def take_over(config: DictConfig, runner: Any) -> Any:
    """Rewrite the configuration of a run with the switch. Returns main_ppo's task runner.

    Exits with status 2 and one line on standard error if the entry point is unknown or the config wrong.
    """
    cls = getattr(runner, "__ray_metadata__", None)
    name = str(getattr(cls, "class_name", None) or getattr(runner, "__name__", runner)).rpartition(".")[2]
    try:
        notes, problems = ((), ()) if name == OWN_RUNNER else apply_entry_point(config, _known(name))
    except AsyncPipelineError as error:
        echo(marked(str(error)), file=sys.stderr)
        raise SystemExit(EXIT_USERS) from None
    for note in notes:
        echo(marked(note))
    hooks.prepare(config, problems)
    return _main_ppos_runner(config)


def without_switch(validate_config: Callable[..., Any]) -> Callable[..., Any]:
    """Return `validate_config` of verl, which raises ConfigError if the configuration has the switch.

    A run that starts by its trainer's name, without our patches, is prepared later and may have it.
    """

    @functools.wraps(validate_config)
    def validate(config: DictConfig, *args: Any, **kwargs: Any) -> Any:
        if _has_switch(config) and OmegaConf.select(config, MODE) != PATCH_FREE:
            error = ConfigError(
                "async_pipeline=True is not known to this entry point, which would ignore it; start "
                f"{_MODULES}, with a verl that `async-pipeline patch apply` has patched"
            )
            # The process may be Ray's, which reports errors in many lines.
            echo(marked(f"cause: {error}"))
            raise error
        return validate_config(config, *args, **kwargs)

    return validate


def _has_switch(config: DictConfig) -> bool:
    return any(OmegaConf.select(config, switch) is True for switch in SWITCHES)


def _known(name: str) -> EntryPoint:
    entry = entry_of_runner(name)
    if entry is None:
        raise ConfigError(
            f"async_pipeline=True is not known to the entry point of {name}, which would ignore it; start "
            f"{_MODULES}"
        )
    return entry


def _main_ppos_runner(config: DictConfig) -> Any:
    """Validate the configuration as verl's main_ppo does, and return its task runner."""
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    return TaskRunnerV1
