# SPDX-License-Identifier: Apache-2.0
"""The rollout replicas of a run: on devices separate from training, loaded a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from ray.exceptions import RayTaskError
from verl.workers.rollout.llm_server import LLMServerManager

from ...config.schema import concurrent_loads
from ...core.items import LoadReport, Publication
from ...errors import WeightSyncError
from ...weight_sync.manifest import Ticket
from ...weight_sync.publisher import Distribution
from ...weight_sync.versioned_engine import LoadMode
from ..object_store_transport import start_on
from ..ray_calls import ASK_S, cause_of, got
from .device_holder import node_id


class ReplicaConsumer:
    """One rollout replica, as `Distribution` sees it."""

    def __init__(
        self,
        replica: Any,
        balancer: Any,
        courier: Any | None,
        piece_bytes: int,
        timeout_s: float,
        how: LoadMode,
    ) -> None:
        """`courier` is None for a replica on the host of the trainer's arenas."""
        self.name = f"replica {replica.replica_rank}"
        self._replica, self._balancer = replica, balancer
        self._arguments = (courier, piece_bytes, timeout_s, how)

    async def load(self, ticket: Ticket) -> LoadReport:
        answers = [server.load_version.remote(ticket, *self._arguments) for server in self._replica.servers]
        try:
            # The servers of one replica load together, so the first report is enough.
            reports: list[LoadReport] = [await answer for answer in answers]
        except RayTaskError as error:
            # Raise the cause itself: one line instead of Ray's remote traceback.
            raise cause_of(error) from error
        return reports[0]

    async def leave(self) -> None:
        await self._balancer.remove_servers.remote([self._replica._server_address])

    async def restart(self) -> None:
        await self._replica.restart()

    async def join(self) -> None:
        replica = self._replica
        await self._balancer.add_servers.remote({replica._server_address: replica._server_handle})

    async def check(self) -> None:
        try:
            for answer in [server.check.remote() for server in self._replica.servers]:
                await answer
        except RayTaskError as error:
            raise cause_of(error) from error


class RolloutPool:
    """The standalone replicas of a run. Loads are rolling: only some replicas load at any time."""

    def __init__(
        self,
        manager: LLMServerManager,
        say: Callable[[str], None],
        *,
        trainer_node: str,
        piece_bytes: int,
        load_timeout_s: float,
        restart_timeout_s: float,
        how: LoadMode,
        max_concurrent_loads: int | None = None,
        note: Callable[[str, str, int | None], None] = lambda event, name, version: None,
    ) -> None:
        """Ask each replica for its node; blocks on Ray calls.

        `trainer_node` is the Ray node of the arenas. `max_concurrent_loads` is the configured value, or None
        for the default. For `say` and `note` see `Distribution`.
        """
        if not manager.get_replicas():
            raise WeightSyncError("no rollout replica was started, so no weights can be served")

        self._manager = manager
        self._trainer_node, self._courier = trainer_node, None

        self._distribution = Distribution(
            [
                ReplicaConsumer(
                    replica,
                    manager.global_load_balancer,
                    self.courier_for(self._nodes_of(replica)),
                    piece_bytes,
                    load_timeout_s,
                    how,
                )
                for replica in manager.get_replicas()
            ],
            say,
            load_timeout_s=load_timeout_s,
            restart_timeout_s=restart_timeout_s,
            wait_timeout_s=restart_timeout_s,
            max_concurrent_loads=concurrent_loads(max_concurrent_loads, len(manager.get_replicas())),
            note=note,
        )

    @staticmethod
    def _nodes_of(replica: Any) -> list[str]:
        asked = [server.__ray_call__.remote(node_id) for server in replica.servers]
        nodes: list[str] = got(
            asked, ASK_S, owner="the trainer", what=f"replica {replica.replica_rank} to name its node"
        )
        return nodes

    def courier_for(self, nodes: Sequence[str]) -> Any:
        """Return None for nodes that can map the trainer's memory, else the run's one courier."""
        if set(nodes) == {self._trainer_node}:
            return None
        self._courier = self._courier or start_on(self._trainer_node)
        return self._courier

    @property
    def replicas(self) -> Sequence[Any]:
        replicas: Sequence[Any] = self._manager.get_replicas()
        return replicas

    def weights(self, owner: str) -> AbstractAsyncContextManager[None]:
        """Hold the weights: no replica changes version until this is left. Raises WaitTimeout."""
        return self._distribution.weights(owner)

    @property
    def versions(self) -> Mapping[str, int]:
        """Return the version that each serving replica serves, by name; a fenced replica is not listed."""
        return self._distribution.versions

    async def publish(self, ticket: Ticket) -> Publication:
        """Have every replica check, load and verify a version; return when all working replicas serve it.

        Raises the last replica's error, or WaitTimeout naming the replica that did not respond, if none
        is left and none returns.
        """
        outcome = await self._distribution.publish(ticket)
        return Publication(
            version=ticket.version,
            num_bytes=ticket.num_bytes,
            gather_s=ticket.gather_s,
            replicas=len(outcome.reports),
            failure="; ".join(f"{name}: {why}" for name, why in outcome.failures.items()),
            **vars(LoadReport.total(outcome.reports)),
        )

    async def watch(self) -> None:
        """Fence replicas that stop working between updates. Never returns; raises like `publish`."""
        await self._distribution.watch()

    async def close(self) -> None:
        """Cancel pending restarts of replicas."""
        await self._distribution.close()
