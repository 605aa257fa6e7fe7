# SPDX-License-Identifier: Apache-2.0
"""Actors and replicas recover from a lost node; with real Ray nodes on one machine, without an engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests import HANG_S
from tests.conftest import Load
from tests.fakes.ray_nodes import add_node, start_cluster

pytestmark = [pytest.mark.real_engine, pytest.mark.nightly]

SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_failure_threshold": 3,
}
"""Settings with which Ray detects a lost node within a second."""


class Nodes:
    def __init__(self) -> None:
        self.cluster = start_cluster(num_cpus=4, _system_config=SOON)
        self.others = 0

    def add(self) -> Any:
        self.others += 1
        return add_node(self.cluster, num_cpus=4, num_gpus=1, node_ip_address=f"127.0.0.{1 + self.others}")

    def lose(self, node: Any, pid: int) -> None:
        """Remove a node and kill the process `pid`; other actors of the node end when they notice."""
        self.cluster.remove_node(node, allow_graceful=False)
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    ray.init(address=made.cluster.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.cluster.shutdown()


class Worker:
    async def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()


def test_an_actor_restarts_on_another_node_and_serves_pending_calls(load: Load, nodes: Nodes) -> None:
    actor_class = load("recipe.async_pipeline.verl_bridge.calls.ray_calls").restartable(Worker)
    lost = nodes.add()
    there = NodeAffinitySchedulingStrategy(lost.node_id, soft=True)
    worker = actor_class.options(scheduling_strategy=there).remote()
    node, pid = ray.get(worker.where.remote(), timeout=HANG_S)
    assert node == lost.node_id
    nodes.lose(lost, pid)
    # Ray has not noticed yet that the node is lost.
    node, again = ray.get(worker.where.remote(), timeout=HANG_S)
    assert node != lost.node_id and again != pid


def test_the_balancer_runs_on_the_trainers_node(load: Load, nodes: Nodes) -> None:
    module = load("recipe.async_pipeline.verl_bridge.rollout.server_manager")
    for _ in range(3):
        nodes.add()
    rollout = {"nnodes": 1, "full_determinism": False}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}})

    class WithoutReplicas(module.ColocatedLoadBalancer):  # type: ignore[name-defined,misc]
        rollout_replica_class = None
        """Otherwise verl would import an engine."""

    for _ in range(4):
        manager = WithoutReplicas.create_empty(config)
        where = manager.global_load_balancer.__ray_call__.remote(
            load("recipe.async_pipeline.verl_bridge.rollout.device_holder").node_id
        )
        assert ray.get(where, timeout=HANG_S) == ray.get_runtime_context().get_node_id()


def replica_of(
    module: ModuleType, num_nodes: int = 1, rank: int = 0, turn: asyncio.Lock | None = None
) -> Any:
    """Return a replica with one device on each of its nodes that records where it would start servers."""

    class Replica(module.PipelineVLLMReplica):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self.replica_rank, self.name_suffix, self.gpus_per_replica_node = rank, "", 1
            self._plain_suffix, self._restarts, self._lost = "", 0, False
            self.nnodes, self._turn = num_nodes, turn or asyncio.Lock()
            self._groups: list[Any] = []
            self._processes: list[list[tuple[int, float]]] = [[]] * num_nodes
            self.servers: list[Any] = []
            self.launched: list[str] = []

        @property
        def is_lost(self) -> bool:
            return self._lost

        def group_ids(self) -> set[str]:
            """Return the ids of its placement groups."""
            return {group.id.hex() for group in self._groups}

        def record_server(self) -> None:
            """Record what `launch_servers` records: one server, without a process to end."""
            self._processes = [[]]

        async def launch_servers(self) -> None:
            self.launched += [
                node for node, _ in await asyncio.gather(*(worker.where() for worker in self.workers))
            ]

    return Replica()


async def test_a_replica_moves_to_another_node_once_it_has_devices(load: Load, nodes: Nodes) -> None:
    replica = replica_of(load("recipe.async_pipeline.verl_bridge.rollout.vllm.server"))
    lost = nodes.add()

    async def restart() -> None:
        await replica.end()
        replica.record_server()
        await replica.start_again()

    await replica.init_standalone()
    await restart()
    assert replica.launched == [lost.node_id] * 2, "the same devices, while they exist"
    nodes.lose(lost, await replica.workers[0]._holder.__ray_call__.remote(lambda holder: os.getpid()))
    restarting = asyncio.create_task(restart())
    await waits_for_devices(replica, restarting)
    restarting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    check_nothing_waits()
    other = nodes.add()
    await asyncio.wait_for(restart(), HANG_S)
    assert replica.launched == [lost.node_id] * 2 + [other.node_id]
    check_nothing_waits()


def groups_in(*states: str) -> set[str]:
    """Return the ids of the placement groups in these states."""
    table = ray.util.placement_group_table()
    return {group for group, found in table.items() if found["state"] in states}


def check_nothing_waits() -> None:
    assert groups_in("CREATED", "REMOVED") == set(ray.util.placement_group_table())


async def waits_for_devices(replica: Any, restarting: asyncio.Task[None]) -> None:
    """Wait until Ray has noticed the lost node and has too few devices for what the replica asks for."""
    while not (replica.is_lost and groups_in("PENDING") & replica.group_ids()):  # noqa: ASYNC110 - only Ray knows
        assert not restarting.done()
        await asyncio.sleep(0.05)


def test_a_replica_of_two_nodes_moves_if_one_is_lost_and_ends_its_processes_on_the_other(
    load: Load, nodes: Nodes
) -> None:
    replica = replica_of(load("recipe.async_pipeline.verl_bridge.rollout.vllm.server"), 2)
    rank = subprocess.Popen(["sleep", "infinity"])
    there = [nodes.add(), nodes.add()]

    async def main() -> None:
        await replica.init_standalone()
        await replica.launch_servers()
        first, second = replica.launched[-2:]
        assert {first, second} == {node.node_id for node in there}
        lost, kept = there if there[0].node_id == first else there[::-1]
        nodes.lose(lost, await replica.workers[0]._holder.__ray_call__.remote(lambda holder: os.getpid()))
        replica._processes = [[], [(rank.pid, psutil.Process(rank.pid).create_time())]]
        await asyncio.wait_for(replica.end(), HANG_S)
        restarting = asyncio.create_task(replica.start_again())
        await waits_for_devices(replica, restarting)
        other = nodes.add()
        await asyncio.wait_for(restarting, HANG_S)
        assert set(replica.launched[-2:]) == {kept.node_id, other.node_id}

    try:
        asyncio.run(main())
        assert rank.wait(HANG_S) == -signal.SIGKILL
    finally:
        rank.kill()
        rank.wait()
    check_nothing_waits()


async def test_replicas_of_two_nodes_wait_for_devices_one_after_the_other(load: Load, nodes: Nodes) -> None:
    """With one node each, both would wait for ever."""
    module = load("recipe.async_pipeline.verl_bridge.rollout.vllm.server")

    turn = asyncio.Lock()
    replicas = [replica_of(module, 2, rank, turn) for rank in range(2)]
    for replica in replicas:
        replica.resource_pool = SimpleNamespace()
        replica._bundles = [[{"CPU": 2, "GPU": 1}]] * 2
    nodes.add()
    starts = [asyncio.create_task(replica._reserve_others()) for replica in replicas]
    while not (replicas[0].group_ids() & groups_in("CREATED")):  # noqa: ASYNC110 - only Ray knows
        await asyncio.sleep(0.05)
    assert not starts[0].done() and replicas[1].group_ids() == set()
    nodes.add()
    await asyncio.wait_for(starts[0], HANG_S)
    replicas[0].release()
    await asyncio.wait_for(starts[1], HANG_S)
