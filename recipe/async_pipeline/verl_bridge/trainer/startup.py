# SPDX-License-Identifier: Apache-2.0
"""Place workers on the pools of the run, and start rollout servers while the training workers start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
from omegaconf import DictConfig
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.utils import Role
from verl.utils.device import get_device_name

from ...config.derived.adapters import adapter_rank
from ...config.knobs.schema import AsyncPipelineConfig
from ...config.placement import TEACHER, Placement
from ...weight_sync.engine.versioned_engine import LoadMode
from ..calls.ray_calls import BlockingCalls, result_of
from ..rollout.replica_pool import RolloutPool
from ..rollout.server_manager import PipelineServerManager
from ..workers.log_prob_group import start_group
from ..workers.training_worker import PipelineCritic, PipelineWorker
from .batches.log_probs import verls_name
from .reporting.terminal import say

START_S = 1800.0
"""Minimum timeout for the start of engines and models, if `wait_timeout_s` is shorter."""
WORKERS = ((Role.Actor, PipelineWorker), (Role.RefPolicy, PipelineWorker), (Role.Critic, PipelineCritic))
"""Worker classes that replace verl's."""


class Startup:
    """Starts rollout servers, and workers that verl does not start, while verl starts its workers."""

    def __init__(
        self, config: DictConfig, knobs: AsyncPipelineConfig, placement: Placement, calls: BlockingCalls
    ) -> None:
        self._config, self._knobs, self._placement, self._calls = config, knobs, placement, calls
        self._deadline_s = max(START_S, knobs.faults.wait_timeout_s)
        self._groups: dict[str, Future[RayWorkerGroup]] = {}
        self.servers: PipelineServerManager
        """Set once the training devices are reserved."""

    def place_workers(self, worker_classes: dict[Any, Any], pools: Any) -> None:
        """Add the pools of the placement to verl's pools, and replace verl's worker classes."""
        for role, worker in WORKERS:
            if role in worker_classes:
                worker_classes[role] = ray.remote(worker)
        for pool in self._placement.pools:
            if not {"train", "generate", TEACHER}.isdisjoint(pool.roles):
                continue  # verl adds the ones of training and teachers
            pools.resource_pool_spec[verls_name(pool)] = list(pool.per_node)
            for stage, role in (("ref_logp", Role.RefPolicy), ("critic", Role.Critic)):
                if stage in pool.roles:
                    pools.mapping[role] = verls_name(pool)

        create = pools.create_resource_pool

        def create_and_start() -> None:
            create()
            self._reserve(pools)

        pools.create_resource_pool = create_and_start

    def _reserve(self, pools: Any) -> None:
        """Reserve the training devices, then start the servers.

        In this order, the servers cannot take devices of a node that training needs as a whole.
        """
        for pool in pools.resource_pool_dict.values():
            pool.get_placement_groups(device_name=get_device_name())
        # With adapters, verl starts no workers for the reference.
        for stage in ("logp", "ref_logp") if adapter_rank(self._config) else ("logp",):
            own = self._placement.own_pool_of(stage)
            if own is not None:
                # OmegaConf is not thread-safe: give the thread its own copy.
                config = copy.deepcopy(self._config)
                pool = pools.resource_pool_dict[verls_name(own)]
                self._groups[stage] = self._calls.submit(start_group, stage, pool, config)
        self.servers = PipelineServerManager.started(self._config)

    def rollout_pool(
        self,
        note: Callable[..., None],
        resized: Callable[[int], None],
    ) -> RolloutPool:
        """Return the replicas, once all of them have started. Blocks."""
        self.servers.ready(self._deadline_s)
        sync = self._knobs.weight_sync
        return RolloutPool(
            self.servers,
            say,
            piece_bytes=sync.load_bucket_size_mb << 20,
            load_timeout_s=sync.timeout_s,
            restart_timeout_s=self._knobs.faults.wait_timeout_s,
            how=LoadMode(sync.in_flight_policy, sync.load_staging, sync.reuse_prefixes),
            max_concurrent_loads=sync.max_concurrent_loads,
            delta=sync.delta,
            note=note,
            resized=resized,
        )

    def group_of(self, stage: str) -> Any | None:
        """Return the workers that were started for the stage's own pool, or None if there are none.

        Blocks until they have started.
        """
        if stage not in self._groups:
            return None
        return result_of(
            self._groups[stage],
            self._deadline_s,
            owner="the trainer",
            what=f"the workers of {stage} to start",
        )
