# SPDX-License-Identifier: Apache-2.0
"""Choose the Ray cluster of a run: a new one on this machine, or a running one that the user names.

Ray itself would join any cluster that runs on this machine, and refuse the sizes that verl's config gives to
a new one.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from traceback import walk_tb
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray._private import services
from ray._private.node import Node

from ...config.paths import OWN
from ...config.placement import Placement
from ...console import echo
from ...errors import ConfigError
from ...observe.causes import one_line
from ...observe.table import MARK
from ...processes import SLOW_START, repeat_slow_start
from .run_config import ADDRESS, AUTO, INIT, LOCAL, VARIABLE, address_to_join

OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "include_dashboard")
"""Arguments of `ray.init` that describe a cluster to start; most are an error when it joins one."""
ANSWER_S = 5.0
"""Seconds for the address of a cluster to accept a connection."""
MARK_PREFIX = ".driver-"


def choose_cluster(config: DictConfig, placement: Placement) -> tuple[dict[str, None | str], str]:
    """Return the values of verl's config for the chosen cluster, and one line about the choice.

    Raises ConfigError if the named cluster does not answer, or if a new one could not hold the run although
    another one is running.
    """
    address = address_to_join(config)
    if address is not None:
        found = _find(address)
        # A null value is an argument with Ray's default.
        given = [name for name in OF_A_NEW_CLUSTER if OmegaConf.select(config, f"{INIT}.{name}") is not None]
        ignored = f"; {', '.join(f'{INIT}.{name}' for name in given)} do not apply" if given else ""
        return (
            {ADDRESS: address} | {f"{INIT}.{name}": None for name in given},
            f"Ray: joins the running cluster at {found}{ignored}",
        )

    running = sorted(services.find_gcs_addresses())
    if running and OmegaConf.select(config, ADDRESS) is None and _spans_nodes(placement):
        raise ConfigError(
            f"{ADDRESS} must be set if a pool takes several nodes and a Ray cluster runs on this machine "
            f"(at {running[0]}), got None; set {VARIABLE}={AUTO} to join it, or {ADDRESS}={LOCAL} to start "
            "another one on this machine"
        )
    other = f"; to join the one at {running[0]}, set {VARIABLE}={AUTO}" if running else ""
    return {ADDRESS: LOCAL}, f"Ray: starts a new cluster on this machine{other}"


def _spans_nodes(placement: Placement) -> bool:
    return any(len(pool.per_node) > 1 for pool in placement.pools)


def _find(address: str) -> str:
    """Return host and port of a cluster. Raises ConfigError if none is found or it does not answer."""
    if "://" in address:
        return address
    by_variable = os.environ.get(VARIABLE) == address
    source = f"{VARIABLE}={address}" if by_variable else f"{ADDRESS}={address}"
    other = f"unset {VARIABLE}" if by_variable else "leave it out"
    remedy = f"start one with `ray start --head`, or {other} to start a new cluster with the run"
    try:
        found: str = services.canonicalize_bootstrap_address_or_die(address)
    except (ConnectionError, ValueError) as error:
        reason = str(error).split(". ")[0].rstrip(".")
        raise ConfigError(f"{source} must name a running Ray cluster, got none: {reason}; {remedy}") from None
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise ConfigError(
            f"{source} must name a running Ray cluster, but {found} does not answer "
            f"({error.strerror or error}); {remedy}"
        ) from None
    return found


def require_devices(resource: str, needed: int) -> None:
    """Raises ConfigError if the cluster of the run, which Ray is connected to, has fewer devices.

    `resource` is Ray's name of them. verl checks the same, but only when the trainer's process has loaded its
    modules.
    """
    there = int(ray.cluster_resources().get(resource, 0))
    if there < needed:
        raise ConfigError(
            f"the Ray cluster must have {needed} devices ({resource}) for all pools and a reward model, got "
            f"{there}; add nodes, or lower trainer.n_gpus_per_node or "
            "actor_rollout_ref.rollout.n_gpus_per_node"
        )


def with_cause(init: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ray.init` that repeats a slow start, with one line about the cause above its error."""

    @wraps(init)
    def with_line(*args: Any, **kwargs: Any) -> Any:
        try:
            return repeat_slow_start(partial(init, *args, **kwargs), end_failed_node)
        except Exception as error:
            remedy = (
                "the machine was too busy for it; free some cores and repeat, or start Ray first with "
                f"`ray start --head` and set {VARIABLE}={AUTO}"
                if SLOW_START in str(error).lower()
                else "the logs in session_latest/logs of Ray's temporary folder say more"
            )
            echo(f"{MARK} cause: Ray did not start: {one_line(error)}; {remedy}")
            raise

    return with_line


def end_failed_node(error: Exception) -> None:
    """End the processes of the node whose start has raised `error`; Ray leaves them behind."""
    for frame, _ in walk_tb(error.__traceback__):
        for node in {value for value in frame.f_locals.values() if isinstance(value, Node)}:
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def mark_run_dir(run_dir: Path) -> str:
    """Leave a file in the run directory by which another node recognizes it. Returns its name."""
    for old in run_dir.glob(f"{MARK_PREFIX}*"):
        old.unlink(missing_ok=True)
    name = f"{MARK_PREFIX}{uuid.uuid4().hex}"
    (run_dir / name).touch()
    return name


def require_run_dir(run_dir: Path, mark: str | None) -> None:
    """Remove the mark. Raises ConfigError if this process does not see the driver's run directory.

    The trainer's process calls this; `mark` is None if it runs on the driver's node anyway.
    """
    if mark is None:
        return
    try:
        (run_dir / mark).unlink()
    except OSError:
        raise ConfigError(
            f"{OWN}.run_dir must be on a file system that the nodes of the Ray cluster share, got {run_dir}, "
            f"which the trainer on {socket.gethostname()} does not see; set it to a shared directory"
        ) from None
