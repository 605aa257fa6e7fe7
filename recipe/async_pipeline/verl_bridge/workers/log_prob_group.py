# SPDX-License-Identifier: Apache-2.0
"""Workers that compute log-probs on separate devices. If one dies, its whole group restarts on the same
devices.

Other stages are not affected: these workers are forward-only, and the batch is computed again. Workers on
the training devices cannot be replaced this way; if one dies, the run ends and resumes from its
checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import ray
from omegaconf import DictConfig
from ray.exceptions import RayActorError
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

from ...config.derived.adapters import publishes_adapters
from ..launch.run_config import knobs_of
from ..rules.adapter_config import without_adapters
from .log_prob_worker import LogProbWorker, logp_config
from .training_worker import PipelineWorker

T = TypeVar("T")
ATTEMPTS = 3
"""Give up after this many deaths over one batch: the batch itself may cause them."""
BACK_OFF_S = 1.0
"""Delay before the first restart; it doubles for each further one."""


def start_group(role: str, pool: Any, config: DictConfig) -> RayWorkerGroup:
    """Start the workers of `logp` or `ref_logp` on a pool, with the initial weights of the run. Blocks."""
    worker, settings = (
        (LogProbWorker, logp_config(config.actor_rollout_ref))
        if role == "logp"
        else (PipelineWorker, reference_config(config))
    )
    made = RayClassWithInitArgs(ray.remote(worker), config=settings, role="ref")
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name=config.trainer.device)
    group.init_model()
    return group


def reference_config(config: DictConfig) -> DictConfig:
    """Return `actor_rollout_ref` for a reference policy with separate devices.

    Only a reference that gets published adapters has adapters itself.
    """
    if has_adapters(config):
        return cast("DictConfig", config.actor_rollout_ref)
    return without_adapters(config.actor_rollout_ref)


def has_adapters(config: DictConfig) -> bool:
    """Return whether a reference policy with separate devices takes published adapters."""
    return publishes_adapters(config) and knobs_of(config).training.ref_refresh_every > 0


def end_group(group: Any) -> None:
    """End the workers, whatever their state."""
    for worker in group.workers:
        ray.kill(worker)


async def retry_on_actor_death(
    work: Callable[[], Awaitable[T]], restart: Callable[[Exception], Awaitable[None]]
) -> T:
    """Await `work`; if a worker dies during it, call `restart` and begin again.

    Raises the workers' error after `ATTEMPTS` deaths. Other errors propagate at once.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await work()
        except RayActorError as error:
            if attempt == ATTEMPTS:
                raise
            await asyncio.sleep(BACK_OFF_S * 2 ** (attempt - 1))
            await restart(error)
    raise AssertionError("the last attempt returns or raises")
