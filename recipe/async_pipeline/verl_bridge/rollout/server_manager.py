# SPDX-License-Identifier: Apache-2.0
"""Start rollout servers on their share of the devices, and the load balancer on the trainer's node."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import ray
from omegaconf import DictConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_resource_name
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.router import DEFAULT_ROUTING_CACHE_SIZE, GlobalRequestLoadBalancer

from ...config.placement import Placement
from ..calls.ray_calls import got, result_of
from ..launch.run_config import open_requests_of
from .client import PipelineLLMClient
from .standalone_replica import SHARES_OF_A_DEVICE, StandaloneReplica


class PipelineServerManager(LLMServerManager):
    """verl's manager with this package's replicas."""

    rollout_replica_class: Callable[..., StandaloneReplica] | None = None
    """Set on the class to use other replicas than the ones of the configured engine."""

    _early: ClassVar[PipelineServerManager | None] = None

    def __init__(self, config: DictConfig) -> None:
        """Begin to start the servers in a thread; `ready` waits for them."""
        # OmegaConf is not thread-safe: deepcopy detaches child nodes, so a concurrent interpolation can
        # fail. Give the thread its own copy.
        super().__init__(config=copy.deepcopy(config))
        starter = ThreadPoolExecutor(1, thread_name_prefix="rollout-start")
        self._starting = starter.submit(lambda: asyncio.run(self._initialize_llm_servers()))
        starter.shutdown(wait=False)

    async def _initialize_llm_servers(self, start_rank: int | None = None) -> None:
        bound = open_requests_of(self.config).per_replica
        made_by = type(self).rollout_replica_class or replica_class_of(
            self.config.actor_rollout_ref.rollout.name
        )
        self.rollout_replica_class = partial(made_by, max_open_requests=bound, turn=asyncio.Lock())
        await super()._initialize_llm_servers(start_rank)

    @classmethod
    def start_early(cls, config: DictConfig) -> None:
        """Start now if the servers can take no device of another stage, i.e. if all devices are on one
        node.

        The trainer that is created later in this process takes this manager over.
        """
        if len(_devices_by_node()) <= 1:
            import_model_packages(config)
            cls._early = cls(config)

    @classmethod
    def started(cls, config: DictConfig) -> PipelineServerManager:
        """Return the manager that was started early, or a new one."""
        early, cls._early = cls._early, None
        return early or cls(config)

    def ready(self, timeout_s: float) -> None:
        """Wait for the servers and add them to the balancer. Raises WaitTimeout, or the start's error."""
        result_of(self._starting, timeout_s, owner="the trainer", what="all rollout servers to start")
        servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
        added = self.global_load_balancer.add_servers.remote(servers)
        # On a busy machine the balancer's process may still be starting.
        got(added, timeout_s, owner="the trainer", what="the balancer to add the rollout servers")

    def get_client(self, client_cls: type[LLMServerClient] | None = None, **kwargs: Any) -> LLMServerClient:
        return super().get_client(client_cls or PipelineLLMClient, **kwargs)

    def another(self) -> StandaloneReplica:
        """Return one more replica, which is not started yet."""
        assert self.rollout_replica_class is not None, "set when the first servers were started"
        made = self.rollout_replica_class(
            replica_rank=1 + max(replica.replica_rank for replica in self.rollout_replicas),
            config=self.rollout_config,
            model_config=self.model_config,
            gpus_per_node=self.rollout_config.n_gpus_per_node,
        )
        # Kept although it may leave: Ray may still hold the names of its actors.
        self.rollout_replicas.append(made)
        return made

    def attach(self, balancer: Any) -> None:
        """Use a balancer that verl has started, so that clients can be created before the servers are up."""
        self.global_load_balancer = balancer


def import_model_packages(config: DictConfig) -> None:
    """Load the model's config and tokenizer as the trainer will, before a thread imports an engine.

    transformers replaces the package of a model type by another module at the end of its import. A thread
    that finds it in between keeps the first one, which has no names, and fails with an ImportError.
    """
    omega_conf_to_dataclass(config.actor_rollout_ref.model)


def replica_class_of(engine: str) -> Callable[..., StandaloneReplica]:
    """Return the replica class of an engine. Imports the engine, which takes seconds."""
    if engine == "sglang":
        from .sglang.server import PipelineSGLangReplica

        return PipelineSGLangReplica
    if engine == "diffusers":
        from .diffusers.server import PipelineDiffusersReplica

        return PipelineDiffusersReplica
    from .vllm.server import PipelineVLLMReplica

    return PipelineVLLMReplica


# verl's manager looks the class of the configured engine up, also where it starts no replica.
RolloutReplicaRegistry.register("diffusers", partial(replica_class_of, "diffusers"))


class ColocatedLoadBalancer(LLMServerManager):
    """verl's manager without replicas, which starts the balancer on the trainer's node.

    Ray would place the balancer on any node, and the loss of that node would end the run too.
    """

    async def _init_global_load_balancer(self) -> None:
        settings = self.rollout_config
        if settings.get("router_config_path") or self._load_balancer_cls:
            await super()._init_global_load_balancer()
            return
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.global_load_balancer = (
            ray.remote(GlobalRequestLoadBalancer)
            .options(scheduling_strategy=here)
            .remote(
                servers={},
                max_cache_size=DEFAULT_ROUTING_CACHE_SIZE,
                full_determinism=bool(settings.get("full_determinism")),
            )
        )


def _devices_by_node() -> list[int]:
    """Return the number of devices of each node that has any."""
    found = [int(node["Resources"].get(get_resource_name(), 0)) for node in ray.nodes() if node["Alive"]]
    return [devices for devices in found if devices]


def room_by_node(devices: int) -> dict[str, tuple[str, int]]:
    """Return, by Ray node, its address and how often `devices` fit on its free ones. Blocks.

    `devices` are the ones of a replica, or of each of its nodes if it takes several.
    """
    free = ray._private.state.available_resources_per_node()

    def fits(node: str) -> int:
        resources = free.get(node, {})
        cpus = resources.get("CPU", 0) / (SHARES_OF_A_DEVICE * devices)
        return int(min(resources.get(get_resource_name(), 0) / devices, cpus))

    return {
        node["NodeID"]: (node["NodeManagerAddress"], fits(node["NodeID"]))
        for node in ray.nodes()
        if node["Alive"]
    }


def devices_of_a_node(placement: Placement) -> int:
    """Return the devices of the largest node, from Ray or, if it counts none, from the placement."""
    return max([*_devices_by_node(), *(max(pool.per_node) for pool in placement.pools)])
