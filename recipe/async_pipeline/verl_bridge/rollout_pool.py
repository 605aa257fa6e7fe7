# SPDX-License-Identifier: Apache-2.0
"""The rollout replicas of a run: started on devices of their own, loaded one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import ray
from omegaconf import DictConfig
from verl.workers.rollout.llm_server import LLMServerManager

from ..core.clock import within
from ..core.items import Publication
from ..errors import WeightSyncError
from ..weight_sync.manifest import decode
from .device_holder import node_id
from .vllm_replica import PipelineVLLMReplica

GRACE_S = 30.0
"""A replica's own deadline fires first, so that its message, which knows more, is the one shown."""


class PipelineServerManager(LLMServerManager):
    """verl's manager, starting our replicas."""

    rollout_replica_class = PipelineVLLMReplica

    _early: ClassVar[PipelineServerManager | None] = None

    def __init__(self, config: DictConfig) -> None:
        """Begins to start the servers at once, in a thread; `ready` waits for them."""
        super().__init__(config=config)
        starter = ThreadPoolExecutor(1, thread_name_prefix="rollout-start")
        self._starting = starter.submit(lambda: asyncio.run(self._initialize_llm_servers()))
        starter.shutdown(wait=False)

    @classmethod
    def start_early(cls, config: DictConfig) -> None:
        """Begin now; the trainer that is made later in this process takes this one over."""
        cls._early = cls(config)

    @classmethod
    def started(cls, config: DictConfig) -> PipelineServerManager:
        """The manager that was begun early, or a new one."""
        early, cls._early = cls._early, None
        return early or cls(config)

    def ready(self) -> None:
        """Wait for the servers and tell the balancer about them. Raises what their start raised."""
        self._starting.result()
        servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
        ray.get(self.global_load_balancer.add_servers.remote(servers))

    def attach(self, balancer: Any) -> None:
        """Use a balancer that verl has started, so that clients can be made before the servers are up."""
        self.global_load_balancer = balancer


class RolloutPool:
    """Owns the standalone replicas. Loads are rolling: only one replica at a time is busy with one."""

    def __init__(self, manager: LLMServerManager, piece_bytes: int, timeout_s: float) -> None:
        if not manager.get_replicas():
            raise WeightSyncError("no rollout replica was started, so no weights can be served")
        self._manager = manager
        self._piece_bytes = piece_bytes
        self._timeout_s = timeout_s
        self.weights = asyncio.Lock()
        """Held while replicas change version, and by whoever needs them not to."""

    @property
    def replicas(self) -> Sequence[Any]:
        replicas: Sequence[Any] = self._manager.get_replicas()
        return replicas

    def node_ids(self) -> set[str]:
        """Ray nodes that replicas run on. Blocks on a Ray call."""
        calls = [server.__ray_call__.remote(node_id) for replica in self.replicas for server in replica.servers]
        return set(ray.get(calls))

    async def publish(self, manifest: bytes) -> Publication:
        """Have every replica check, load and prove a version; returns when all serve it.

        Raises what a replica raised, or WaitTimeout naming the replica that did not answer.
        """
        described = decode(manifest)
        reports = []
        async with self.weights:
            for replica in self.replicas:
                reports.append(await self._load(replica, manifest, described.version))
        return Publication(
            version=described.version,
            num_bytes=described.num_bytes,
            gather_s=described.gather_s,
            transfer_s=sum(r["transfer_s"] for r in reports),
            load_s=sum(r["load_s"] for r in reports),
            tensors_proved=int(sum(r["tensors_proved"] for r in reports)),
            replicas=len(reports),
        )

    async def _load(self, replica: Any, manifest: bytes, version: int) -> dict[str, float]:
        answers = [s.load_version.remote(manifest, self._piece_bytes, self._timeout_s) for s in replica.servers]
        results = await within(
            _all(answers),
            self._timeout_s + GRACE_S,
            owner="param_update",
            what=f"replica {replica.replica_rank} to load version {version}",
            holder=lambda: f"replica {replica.replica_rank} does not answer",
        )
        report: dict[str, float] = results[0]
        return report


def require_one_host(trainer_nodes: set[str], replica_nodes: set[str]) -> None:
    """Raises WeightSyncError: weights travel over the memory of one host, and there are several."""
    if len(trainer_nodes | replica_nodes) > 1:
        raise WeightSyncError(
            f"rank 0 of the trainer and all replicas must share one host, got {len(trainer_nodes | replica_nodes)} "
            "Ray nodes; weights over several hosts are not supported yet"
        )


async def _all(references: Sequence[Any]) -> list[Any]:
    return [await reference for reference in references]
