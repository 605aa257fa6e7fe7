# SPDX-License-Identifier: Apache-2.0
"""Prepare a run before Ray starts: check the config, translate keys, report errors on one line.

verl's patched entry point calls `prepare` with the whole config before it starts Ray, and `check_cluster` and
`start_sample_store` after that.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.utils.device import get_resource_name

from ...checkpoint import owner
from ...checkpoint.resume import LEDGER, check_ledger, origin_of, root_of, saves
from ...config.checks.agent_program import program_values
from ...config.checks.rollout_correction import describe_correction
from ...config.checks.verl_options import MANAGER
from ...config.derived.runtime import RuntimeConfig
from ...config.keys.foreign_keys import LOSS_CONFIG
from ...config.keys.misplaced import SWITCHES
from ...config.knobs.schema import AsyncPipelineConfig, is_strategy, plain
from ...config.paths import OWN, RUNTIME
from ...console import echo
from ...errors import AsyncPipelineError
from ...observe.run_directory.run_files import run_of, set_aside_run
from ...observe.table import marked
from .. import replaced
from ..cpu.cpu_overrides import import_in_workers
from ..cpu.cpu_platform import is_cpu
from ..process.interrupts import end_with_watch
from ..rules.config_checks import FOREIGN_PATHS, Checked, checked, set_verls_keys
from ..rules.config_rules import STOCK_LOSS_CONFIG, reward_model_devices
from ..rules.model_rules import ROLLOUT
from .command_line import checked_with
from .engine_contract import check_engine
from .ray_cluster import choose_cluster, mark_run_dir, require_devices
from .run_config import ADDRESS, LATEST, LOCAL, copy_of, remove_keys, run_dir_of, update

REWARDS_MODULE = "pkg://recipe.async_pipeline.verl_bridge.reward.manager"
ENGINE_MODULE = "recipe.async_pipeline.verl_bridge.weights.checkpoint_engine"


def prepare(config: DictConfig, problems: tuple[str, ...] = ()) -> None:
    """Rewrite a verl config that asks for the pipeline so that it runs; leave other configs unchanged.

    Exits with status 2 and a line on standard error for each problem if the config is wrong, or if there are
    `problems` already.
    """
    end_with_watch()
    with _refusals():
        _prepare(config, problems)
    if is_cpu():  # in jobs of stock trainers too
        import_in_workers(str(OmegaConf.select(config, f"{ROLLOUT}.name")))


def check_cluster(config: DictConfig) -> None:
    """Check that the cluster, which Ray is connected to, has the devices of the run.

    Exits with status 2 and one line on standard error otherwise.
    """
    with _refusals():
        _require_devices(config)


def adopt(config: DictConfig) -> None:
    """Prepare the config of a run whose trainer verl already makes, in the trainer's process.

    verl has started Ray and resolved the config by then. Raises ConfigError or PatchedVerlRequired if the
    pipeline could not run.
    """
    found = checked(config)
    assert found is not None, "verl makes this trainer only if the mode asks for it"
    _check_engine(config, found)
    run_dir = _take_folders(config, found.translation.config)
    notes = set_verls_keys(config, found, ())
    _rewrite(config, found, run_dir, joins=False)
    _require_devices(config)
    _tell(config, found, notes)


def _check_engine(config: DictConfig, found: Checked) -> None:
    """Raises ConfigError if the installed engine lacks something that the run uses; warns if a knob asks."""
    planned = copy_of(config)
    update(planned, found.translation.verl)
    if line := check_engine(planned, found.translation.config.engine_check):
        _say(line)


def _require_devices(config: DictConfig) -> None:
    plain = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    needed = RuntimeConfig.of(plain).placement.devices + reward_model_devices(config)
    require_devices(get_resource_name(), needed)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn an error of the user into one line and an exit."""
    try:
        yield
    except AsyncPipelineError as error:
        sys.stderr.write(f"{marked(error.report)}\n")
        raise SystemExit(2) from None


def start_sample_store(config: DictConfig) -> None:
    """Start TransferQueue from the driver, which is idle while the trainer's process imports.

    verl's entry point calls this after it has requested the trainer's process, which then finds the store
    running. `tq.close` in the trainer leaves the storage to the process that started it, so the driver closes
    it at exit, before Ray stops. A stock trainer starts its own store, even if our defaults were composed in.
    """
    if not is_strategy(str(config.trainer.v1.trainer_mode)):
        return
    import transfer_queue as tq

    replaced.apply("sample store")
    tq.init(OmegaConf.create(OmegaConf.to_container(config.transfer_queue, resolve=True)))
    atexit.register(tq.close)


def _prepare(config: DictConfig, problems: tuple[str, ...]) -> None:
    found = checked_with(problems, config) if problems else checked(config)
    if found is None:
        return
    _check_engine(config, found)
    cluster, line = choose_cluster(config, found.placement)
    run_dir = _take_folders(config, found.translation.config)
    notes = set_verls_keys(
        config, found, HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    )
    _rewrite(config, found, run_dir, joins=cluster[ADDRESS] != LOCAL)
    with open_dict(config):
        update(config, cluster)
    replaced.apply("driver")
    _say(line)
    _tell(config, found, notes)


def _tell(config: DictConfig, found: Checked, notes: Sequence[str]) -> None:
    """Print what the keys of the user led to, with `notes` on verl's keys."""
    for note in (*found.translation.notes, *notes, *(f"not checked: {one}" for one in found.unchecked)):
        _say(note)
    knobs = found.translation.config
    correction = describe_correction(config, found.old_logp, knobs.staleness.max_lag)
    if knobs.staleness.max_lag and correction.startswith("none"):
        _say(f"correction for staleness: {correction}")


def _rewrite(config: DictConfig, found: Checked, run_dir: Path, *, joins: bool) -> None:
    """Rewrite the config to start our trainer, with the knobs and the state of the run.

    `joins` means that the run joins a Ray cluster, which may start the trainer's process on another node.
    """
    knobs = found.translation.config
    origin = origin_of(
        cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True)),
        knobs,
        found.placement,
        importlib.metadata.version("verl"),
        run_dir,
        _say,
    )
    if origin.found is not None:
        check_ledger(run_dir, origin.found)
    if run_of(run_dir / LEDGER) != origin.run and (kept := set_aside_run(run_dir)):
        _say(f"records of an earlier run are kept in {kept}")

    manager = OmegaConf.to_container(config.reward.reward_manager, resolve=True)
    runtime = RuntimeConfig(
        run=origin.run,
        identity=origin.identity,
        epoch=origin.epoch,
        run_dir=run_dir,
        run_dir_mark=mark_run_dir(run_dir) if joins else None,
        resume_from=None if origin.found is None else origin.found.folder,
        started_unix=float(os.environ.get("ASYNC_PIPELINE_STARTED_UNIX") or time.time()),
        placement=found.placement,
        old_logp=found.old_logp,
        reward_manager=None if knobs.reward.timeout_s is None else cast("dict[str, Any]", manager),
    )

    with open_dict(config):
        remove_keys(config, (*SWITCHES, *FOREIGN_PATHS))
        update(config, {OWN: plain(knobs), RUNTIME: runtime.plain()} | program_values(knobs.agentic))
        config.trainer.v1.trainer_mode = knobs.strategy
        config.trainer.default_local_dir = str(origin.root)
        config.actor_rollout_ref.hybrid_engine = False

        rollout = config.actor_rollout_ref.rollout
        rollout.agent.agent_loop_manager_class = MANAGER
        if knobs.reward.timeout_s is not None:
            config.reward.reward_manager.source = "importlib"
            config.reward.reward_manager.module.path = REWARDS_MODULE
            config.reward.reward_manager.name = "GuardedRewardManager"

        losses = config.actor_rollout_ref.actor.policy_loss
        if losses.get("_target_") == STOCK_LOSS_CONFIG:
            losses._target_ = LOSS_CONFIG

        engine, sync = rollout.checkpoint_engine, knobs.weight_sync
        engine.backend = "dual_buffer"
        engine.custom_backend_module = ENGINE_MODULE
        engine.update_weights_bucket_megabytes = sync.gather_bucket_size_mb
        engine.engine_kwargs = {
            "dual_buffer": {"rollout_dtype": str(rollout.dtype), "proof_tensors": sync.verify_tensors}
        }

        logger = config.trainer.logger
        names = [logger] if isinstance(logger, str) else list(logger or [])
        config.trainer.logger = names if "file" in names else [*names, "file"]


def _take_folders(config: DictConfig, knobs: AsyncPipelineConfig) -> Path:
    """Make the run directory, take it and the folder for checkpoints, and link `latest` to the former.

    Returns the absolute path of the run directory. Raises ConfigError if another run has one of the folders.
    """
    run_dir = run_dir_of(config, knobs)
    resolved = cast("dict[str, Any]", OmegaConf.to_container(config.trainer, resolve=True))
    folders = {owner.RUN_DIR: run_dir}
    if saves({"trainer": resolved}):
        folders[owner.ROOT] = root_of({"trainer": resolved})
    owner.own(folders, _say)

    latest = run_dir.parent / LATEST
    temporary = run_dir.parent / f".{LATEST}-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_dir.name)
    if latest.is_symlink() or not latest.exists():
        os.replace(temporary, latest)
    else:
        temporary.unlink()

    _say(f"run directory {run_dir}")
    _say(f"async-pipeline serve {run_dir} shows it in a browser")
    return run_dir


def _say(text: str) -> None:
    echo(marked(text))
