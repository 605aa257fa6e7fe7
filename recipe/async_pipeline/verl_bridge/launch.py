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

from ..checkpoint.resume import check_ledger, origin_of
from ..config.agent_program import program_values
from ..config.loss_modes import LOSS_CONFIG
from ..config.misplaced import SWITCHES
from ..config.paths import MODE, OWN, PATCH_FREE, RUNTIME
from ..config.rollout_correction import describe_correction
from ..config.runtime import RuntimeConfig
from ..config.schema import AsyncPipelineConfig, is_strategy, plain
from ..config.verl_options import MANAGER
from ..errors import AsyncPipelineError, ConfigError
from ..observe.table import MARK
from .attention import set_attention
from .config_checks import (
    FOREIGN_PATHS,
    STOCK_LOSS_CONFIG,
    Checked,
    _update,
    checked,
    remove_keys,
    set_pool_sizes,
)
from .config_rules import reward_model_devices
from .diffusers_rules import draws_images, set_image_keys
from .engine_contract import check_engine
from .engine_memory import set_engine_memory
from .expert_backends import set_expert_kernels
from .model_rules import described_model
from .ray_cluster import ADDRESS, LOCAL, choose_cluster, mark_run_dir, require_devices

REWARDS_MODULE = "pkg://recipe.async_pipeline.verl_bridge.reward.manager"
ENGINE_MODULE = "recipe.async_pipeline.verl_bridge.checkpoint_engine"
REFERRED = ("actor_rollout_ref.actor.ppo_mini_batch_size",)
"""Keys of verl that a knob may set, and that verl's config refers to elsewhere: the critic's mini-batch."""


def prepare(config: DictConfig) -> None:
    """Rewrite a verl config that asks for the pipeline so that it runs; leave other configs unchanged.

    Exits with status 2 and one line on standard error if the config is wrong.
    """
    with _refusals():
        _prepare(config)


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
    _refuse_late_changes(config, found)
    _check_engine(config, found)
    notes = set_verls_keys(config, found, ())
    _rewrite(config, found, joins=False)
    _require_devices(config)
    _tell(config, found, notes)


def _refuse_late_changes(config: DictConfig, found: Checked) -> None:
    """Raises ConfigError if a value would change that verl has computed others of its config from."""
    for path in REFERRED:
        now = OmegaConf.select(config, path)
        value = found.translation.verl.get(path, now)
        if value != now:
            raise ConfigError(
                f"{path} must be {value} with {MODE}={PATCH_FREE}, because a knob asks so, got {now}; set "
                "it too, since verl has computed other values from it"
            )


def _check_engine(config: DictConfig, found: Checked) -> None:
    """Raises ConfigError if the installed engine lacks something that the run uses; warns if a knob asks."""
    if line := check_engine(config, found.translation.config.engine_check):
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
        sys.stderr.write(f"{MARK} {error}\n")
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

    from . import replaced

    replaced.apply("sample store")
    tq.init(OmegaConf.create(OmegaConf.to_container(config.transfer_queue, resolve=True)))
    atexit.register(tq.close)


def _prepare(config: DictConfig) -> None:
    found = checked(config)
    if found is None:
        return
    _check_engine(config, found)
    cluster, line = choose_cluster(config, found.placement)
    notes = set_verls_keys(
        config, found, HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    )
    _rewrite(config, found, joins=cluster[ADDRESS] != LOCAL)
    with open_dict(config):
        _update(config, cluster)
    _say(line)
    _tell(config, found, notes)


def _tell(config: DictConfig, found: Checked, notes: Sequence[str]) -> None:
    """Print what the keys of the user led to, with `notes` on verl's keys."""
    for note in (*found.translation.notes, *notes):
        _say(note)
    knobs = found.translation.config
    correction = describe_correction(config, found.old_logp, knobs.staleness.max_lag)
    if knobs.staleness.max_lag and correction.startswith("none"):
        _say(f"correction for staleness: {correction}")


def set_verls_keys(config: DictConfig, found: Checked, overrides: Sequence[str]) -> tuple[str, ...]:
    """Set verl's own keys to the values that follow from the knobs and from keys of other systems.

    `overrides` is the command line, as far as it is known. Returns a line for each key that gets another
    default than verl's.
    """
    _update(config, found.translation.verl)
    set_pool_sizes(config, found.placement)
    if draws_images(config):
        set_image_keys(config, found.translation.config)
        return ()
    described = described_model(config)
    notes = (
        set_attention(config, described),
        set_expert_kernels(config, described),
        set_engine_memory(config, found.translation.config, overrides),
    )
    return tuple(note for note in notes if note is not None)


def _rewrite(config: DictConfig, found: Checked, *, joins: bool) -> None:
    """Rewrite the config to start our trainer, with the knobs and the state of the run.

    `joins` means that the run joins a Ray cluster, which may start the trainer's process on another node.
    """
    knobs = found.translation.config
    run_dir = _make_run_dir(config, knobs)
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

    manager = OmegaConf.to_container(config.reward.reward_manager, resolve=True)
    runtime = RuntimeConfig(
        run=origin.run,
        identity=origin.identity,
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
        _update(config, {OWN: plain(knobs), RUNTIME: runtime.plain()} | program_values(knobs.agentic))
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


def _make_run_dir(config: DictConfig, knobs: AsyncPipelineConfig) -> Path:
    """Make the run directory, and a link `latest` to it in the same folder. Returns its absolute path."""
    project, name = config.trainer.project_name, config.trainer.experiment_name
    run_dir = Path(knobs.run_dir or Path("outputs") / str(project) / str(name)).resolve()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{OWN}.run_dir must be a writable folder, got {run_dir} ({error.strerror}); set another one"
        ) from None

    latest = run_dir.parent / "latest"
    temporary = run_dir.parent / f".latest-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_dir.name)
    if latest.is_symlink() or not latest.exists():
        os.replace(temporary, latest)
    else:
        temporary.unlink()

    _say(f"run directory {run_dir}")
    return run_dir


def _say(text: str) -> None:
    sys.stdout.write(f"{MARK} {text}\n")
    sys.stdout.flush()
