# SPDX-License-Identifier: Apache-2.0
"""Workers that compute log-probs on devices of their own. If one dies, all of its role start anew on the same
devices.

Nobody else is hurt by that: they are forward only, and what they computed of a batch is computed again.
Workers on the
training devices cannot be replaced so; a run in which one of those dies ends, and goes on from its
checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray
from omegaconf import DictConfig
from ray.exceptions import RayActorError
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

from .log_prob_worker import LogProbWorker, logp_config
from .training_worker import PipelineWorker

T = TypeVar("T")
ATTEMPTS = 3
"""Workers that die so often over one batch are not started again: they may die of it."""
BACK_OFF_S = 1.0
"""Before the first restart; twice that before the next."""


def start_group(role: str, pool: Any, config: DictConfig) -> RayWorkerGroup:
    """The workers of `logp` or `ref_logp` on a pool, with the weights that the run began with. Blocks."""
    worker, settings = (
        (LogProbWorker, logp_config(config.actor_rollout_ref))
        if role == "logp"
        else (PipelineWorker, config.actor_rollout_ref)
    )
    made = RayClassWithInitArgs(ray.remote(worker), config=settings, role="ref")
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name=config.trainer.device)
    group.init_model()
    return group


def end_group(group: Any) -> None:
    """End the workers, whatever state they are in."""
    for worker in group.workers:
        ray.kill(worker)


async def outliving(
    work: Callable[[], Awaitable[T]], start_anew: Callable[[Exception], Awaitable[None]]
) -> T:
    """What `work` comes to; it is begun again whenever a worker died of it, after `start_anew`.

    Raises what the workers died of when they have died `ATTEMPTS` times. Anything else comes through.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await work()
        except RayActorError as error:
            if attempt == ATTEMPTS:
                raise
            await asyncio.sleep(BACK_OFF_S * 2 ** (attempt - 1))
            await start_anew(error)
    raise AssertionError("the last attempt returns or raises")
