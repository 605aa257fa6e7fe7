# SPDX-License-Identifier: Apache-2.0
"""What the replicas of all engines share: they reserve devices, start their servers, and restart them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayResourcePool, ResourcePoolManager
from verl.single_controller.ray.base import sort_placement_group_by_node_ip
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.rollout.replica import RolloutMode

from .device_holder import DeviceReservation, ReservedDevice
from .versioned_server import FurtherServer

OTHER_CALLS = 16
"""verl's calls of a server that are neither requests nor control calls."""


class BoundedReplica:
    """Base of a replica class, before verl's class."""

    def __init__(self, *args: Any, max_open_requests: int, **kwargs: Any) -> None:
        """`max_open_requests`: see `config.derived.scheduling`."""
        super().__init__(*args, **kwargs)
        self._max_open_requests = max_open_requests

    @property
    def max_concurrency(self) -> int:
        """Calls that a server runs at once, besides its control calls. verl starts a server with it."""
        at_least: int = super().max_concurrency  # type: ignore[misc]
        return max(at_least, self._max_open_requests + OTHER_CALLS)


SHARES_OF_A_DEVICE = 2
"""verl splits each device of a rollout pool into two shares: one is reserved, one is for its helpers."""


class StandaloneReplica(BoundedReplica):
    """Base of a replica class, before verl's class, which must be able to launch servers."""

    name_suffix: str
    nnodes: int
    gpus_per_replica_node: int
    replica_rank: int
    rollout_mode: RolloutMode
    resource_pool: Any
    workers: list[ReservedDevice]
    servers: list[Any]

    def __init__(self, *args: Any, turn: asyncio.Lock, **kwargs: Any) -> None:
        """`turn`: held by the replica that waits for devices on several nodes."""
        super().__init__(*args, **kwargs)
        self._turn = turn
        self._plain_suffix, self._restarts = self.name_suffix, 0
        self._processes: list[list[tuple[int, float]]] = []
        self._groups: list[Any] = []
        """Its placement groups."""
        self._lost = False
        """One of its nodes is lost."""

    async def init_standalone(self) -> None:
        """Reserve the devices and start the server on them."""
        self.rollout_mode = RolloutMode.STANDALONE
        name = f"rollout_pool_{self.replica_rank}{self.name_suffix}"
        pools = ResourcePoolManager(
            resource_pool_spec={name: [self.gpus_per_replica_node] * self.nnodes},
            mapping=None,
            max_colocate_count=SHARES_OF_A_DEVICE,
        )
        pools.create_resource_pool()
        self.resource_pool = pools.resource_pool_dict[name]
        groups = self._groups = sort_placement_group_by_node_ip(
            self.resource_pool.get_placement_groups(device_name=get_device_name())
        )
        self._bundles = [group.bundle_specs for group in groups]
        self._hold(groups)
        await self.launch_servers()

    async def init_more(self) -> None:
        """Do the same during a run, on devices that are free or become free.

        Waits for: these devices.
        """
        self.rollout_mode = RolloutMode.STANDALONE
        self.resource_pool = RayResourcePool(
            [self.gpus_per_replica_node] * self.nnodes,
            use_gpu=True,
            max_colocate_count=SHARES_OF_A_DEVICE,
            name_prefix=f"rollout_pool_{self.replica_rank}{self.name_suffix}",
        )
        bundle = {"CPU": SHARES_OF_A_DEVICE, get_platform().ray_resource_name(): 1}
        self._bundles = [[bundle] * self.gpus_per_replica_node] * self.nnodes
        await self._reserve_others()
        await self.launch_servers()

    @property
    def has_devices(self) -> bool:
        """Whether its devices are reserved."""
        return bool(self.workers)

    def _hold(self, groups: Sequence[Any]) -> None:
        """Start a reservation for each device."""
        options = get_platform().ray_resource_options(1 / SHARES_OF_A_DEVICE)
        self.workers = [
            ReservedDevice(
                ray.remote(DeviceReservation)
                .options(
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
                    name=f"rollout_device_{self.replica_rank}{self.name_suffix}_{number}_{bundle}",
                    # Only until Ray knows that a node is lost; then the actors are dead.
                    max_task_retries=-1,
                    **options,
                )
                .remote(),
                get_resource_name(),
            )
            for number, group in enumerate(groups)
            for bundle in range(group.bundle_count)
        ]

    async def _reserve_others(self) -> None:
        """Wait for devices and reserve them: for a new replica, or to replace the ones of a lost node.

        Ray would search for the latter by itself, but without a pause between two attempts, which keeps a
        core of its head node busy (ray-project/ray#65007).
        """
        self._free()
        # One replica at a time: two that wait with one of their nodes each would never get a second one.
        async with self._turn if self.nnodes > 1 else nullcontext():
            self._groups = [placement_group(bundles, strategy="STRICT_PACK") for bundles in self._bundles]
            try:
                for group in self._groups:
                    await group.ready()
            except BaseException:
                self._free()
                raise
        self.resource_pool.pgs = self._groups = sort_placement_group_by_node_ip(self._groups)
        self._hold(self._groups)

    def _free(self) -> None:
        """Free the devices, including devices that are still being waited for."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    async def launch_servers(self) -> None:
        await super().launch_servers()  # type: ignore[misc]
        first, *others = self.servers
        if others:
            places = await asyncio.gather(*[server.place.remote() for server in others])
            await first.join.remote(
                [FurtherServer(s, *place) for s, place in zip(others, places, strict=True)]
            )
        self._processes = await asyncio.gather(*[server.processes.remote() for server in self.servers])

    async def end(self) -> None:
        """End the servers, whatever their state."""
        for server in self.servers:
            ray.kill(server)
        self.servers = []
        # Together: a lost node answers late, and its replica's processes on other nodes must not wait for it.
        await asyncio.gather(*(self._end(*one) for one in enumerate(self._processes)))
        self._processes = []

    async def _end(self, node: int, processes: list[tuple[int, float]]) -> None:
        """End the processes of a server. A stuck engine does not notice that its server is gone."""
        try:
            await self.workers[node * self.gpus_per_replica_node].end(processes)
        except ActorDiedError:
            self._lost = True

    async def start_again(self) -> None:
        """Start new servers on the same devices, or on others if one of their nodes is lost.

        Waits for: other devices.
        """
        self._restarts += 1
        # Ray may still hold the old names.
        self.name_suffix = f"{self._plain_suffix}_{self._restarts}"
        if self._lost:
            await self._reserve_others()
            self._lost = False
        await self.launch_servers()

    def release(self) -> None:
        """Free the devices. After `end`."""
        for worker in self.workers:
            worker.release()
        self.workers = []
        self._free()
