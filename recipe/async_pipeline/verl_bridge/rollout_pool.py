# SPDX-License-Identifier: Apache-2.0
"""The rollout replicas of a run: started on devices of their own, loaded one after another."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from typing import Any

import ray
from verl.workers.rollout.llm_server import LLMServerManager

from ..core.clock import within
from ..core.items import Publication
from ..errors import WeightSyncError
from ..weight_sync.manifest import decode
from .vllm_replica import PipelineVLLMReplica

GRACE_S = 30.0
"""A replica's own deadline fires first, so that its message, which knows more, is the one shown."""


class PipelineServerManager(LLMServerManager):
    """verl's manager, starting our replicas."""

    rollout_replica_class = PipelineVLLMReplica

    def start(self) -> None:
        """Start balancer and servers; blocks until all are up. For a thread without an event loop."""
        try:
            asyncio.run(self._start())
        finally:
            self.balancer_is_up.set()  # whoever waits for it finds the error here

    async def _start(self) -> None:
        # The balancer first, without servers: it takes seconds to import, as the servers do.
        self.server_addresses: list[str] = []
        self.server_handles: list[Any] = []
        await self._init_global_load_balancer()
        self.balancer_is_up.set()
        await self._initialize_llm_servers()
        servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
        await self.global_load_balancer.add_servers.remote(servers)

    @functools.cached_property
    def balancer_is_up(self) -> threading.Event:
        """Set as soon as clients can be made; their requests must wait for the servers."""
        return threading.Event()


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
        calls = [w.__ray_call__.remote(_node_id) for r in self.replicas for w in r.workers]
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


def _node_id(_: Any) -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


async def _all(references: Sequence[Any]) -> list[Any]:
    return [await reference for reference in references]
