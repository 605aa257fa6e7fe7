# SPDX-License-Identifier: Apache-2.0
"""The rollout replicas of a run: on devices separate from training, loaded a few at a time.

`weight_sync/fleet/keeper.py` decides when a failed replica is restarted; the engine's replica class does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, cast

from ray.exceptions import RayTaskError
from verl.workers.rollout.llm_server import LLMServerManager

from ...config.knobs.weight_sync import concurrent_loads
from ...core.groups.items import LoadReport, Publication
from ...core.waits.deadline import all_of
from ...errors import WeightSyncError
from ...weight_sync.engine.versioned_engine import LoadMode
from ...weight_sync.fleet.fleet import Fleet
from ...weight_sync.memory.manifest import WeightTicket
from ..calls.direct_calls import ConnectionLost, DirectCaller
from ..calls.ray_calls import ASK_S, cause_of, got
from ..weights.host_memory_service import HostMemories, MemoryServices
from .device_holder import node_id


class ReplicaConsumer:
    """One rollout replica, as `Fleet` sees it."""

    def __init__(self, replica: Any, pool: RolloutPool, nodes: Sequence[str] = ()) -> None:
        """`nodes` are the Ray nodes of its servers; empty before it has started."""
        self.name = f"replica {replica.replica_rank}"
        self.replica, self.nodes = replica, tuple(nodes)
        self._pool = pool
        self._started = bool(nodes)
        self._callers: dict[Any, DirectCaller] = {}
        self._stages = True
        """False once a staging has failed: it would fail again, also after a restart."""

    async def prepare(self, ticket: WeightTicket) -> None:
        stage = self._pool.how.stage if self._stages else "host"
        arguments = (self._pool.memories_for(ticket), self._pool.load_timeout_s, stage)
        (error,) = await self._call(self._first, "prepare_version", ticket, *arguments)
        if self._stages and error:
            self._stages = False
            self._pool.cannot_stage(self.name, ticket.version, error)

    async def commit(self, version: int) -> LoadReport:
        arguments = (version, self._pool.piece_bytes, self._pool.load_timeout_s, self._pool.how)
        (report,) = await self._call(self._first, "commit_version", *arguments)
        return cast(LoadReport, report)

    @property
    def _first(self) -> Sequence[Any]:
        """The server with the engine, whose ranks may be on the nodes of further servers too."""
        return self.replica.servers[:1]  # type: ignore[no-any-return]

    async def _call(self, servers: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
        """Call a method of some servers, over sockets where possible, and return the results.

        A call through Ray waits while Ray hands over many requests. The method is called again through Ray
        if a connection ends, so it must be idempotent: Ray knows why a server has ended.
        """
        self._callers = {
            server: self._callers.get(server) or DirectCaller(server) for server in self.replica.servers
        }
        found: dict[Any, Any] = {}

        async def call(server: Any, caller: DirectCaller) -> None:
            found[server] = await caller.call(method, *arguments)

        try:
            await all_of(*(call(server, self._callers[server]) for server in servers))
        except ConnectionLost:
            return await self._all([getattr(server, method).remote(*arguments) for server in servers])
        except RayTaskError as error:
            raise cause_of(error) from error
        return [found[server] for server in servers]

    @staticmethod
    async def _all(answers: Sequence[Any]) -> list[Any]:
        """Await the answers of all servers; raise the cause of an error instead of Ray's remote traceback."""
        try:
            return [await answer for answer in answers]
        except RayTaskError as error:
            raise cause_of(error) from error

    async def leave(self) -> None:
        await self._pool.balancer.remove_servers.remote([self.replica._server_address])

    async def end(self) -> None:
        await self.replica.end()

    async def start(self) -> None:
        """Start the servers; they may be on other nodes than before."""
        if self._started:
            await self.replica.start_again()
        else:
            self._started = True
            await self.replica.init_more()
        self.nodes = tuple([await node for node in self._pool.ask_nodes(self.replica)])

    async def join(self) -> None:
        replica = self.replica
        await self._pool.balancer.add_servers.remote({replica._server_address: replica._server_handle})

    async def check(self) -> None:
        await self._call(self.replica.servers, "check")

    async def open_requests(self) -> int:
        return sum(await self._all([server.open_requests.remote() for server in self.replica.servers]))

    async def release(self) -> None:
        self.replica.release()


class RolloutPool:
    """The standalone replicas of a run. Commits are rolling: only some replicas pause at any time."""

    def __init__(
        self,
        manager: LLMServerManager,
        say: Callable[[str], None],
        *,
        piece_bytes: int,
        load_timeout_s: float,
        restart_timeout_s: float,
        how: LoadMode,
        max_concurrent_loads: int | None = None,
        delta: bool = False,
        note: Callable[..., None] = lambda event, name, version, **fields: None,
        resized: Callable[[int], None] = lambda replicas: None,
    ) -> None:
        """Ask each replica for its node; blocks on Ray calls.

        `max_concurrent_loads` is the configured value, or None for the default. `delta`: replicas may ask for
        differences between versions. `say` and `note`: see `weight_sync.fleet.fleet.Fleet`; `note` also gets
        UNSTAGED, and then `why`. `resized` gets the number of replicas whenever one has joined or left.
        """
        if not manager.get_replicas():
            raise WeightSyncError("no rollout replica was started, so no weights can be served")

        self._manager, self.balancer = manager, manager.global_load_balancer
        self._memory = MemoryServices(delta=delta)
        self._copies: dict[str, Sequence[str]] = {}
        """The Ray nodes of each copy of the policy."""
        self.piece_bytes, self.load_timeout_s, self.how = piece_bytes, load_timeout_s, how

        replicas = manager.get_replicas()
        self.fleet = Fleet(
            [ReplicaConsumer(replica, self, self._nodes_of(replica)) for replica in replicas],
            say,
            load_timeout_s=load_timeout_s,
            restart_timeout_s=restart_timeout_s,
            wait_timeout_s=restart_timeout_s,
            max_concurrent_loads=partial(concurrent_loads, max_concurrent_loads),
            note=self._noted,
        )
        self._note, self._resized, self._size = note, resized, len(replicas)
        self._say, self._unstaged = say, set[str]()
        """The replicas whose staging has failed."""

    def cannot_stage(self, name: str, version: int, error: str) -> None:
        """Report that a replica loads its further versions from host memory; say so for the first one."""
        self._note("UNSTAGED", name, version, why=error)
        if not self._unstaged:
            self._say(
                f"{name} could not copy version {version} to its devices: {error}; replicas that cannot "
                "load their further versions from host memory; leave more device memory free, or set "
                "weight_sync.load_staging=host"
            )
        self._unstaged.add(name)

    def _noted(self, event: str, name: str, version: int | None) -> None:
        self._note(event, name, version)
        if event in ("JOINED", "LEFT") and self.fleet.joined != self._size:
            self._size = self.fleet.joined
            self._resized(self._size)

    def add_replica(self) -> str:
        """Start one more replica on free devices, and return its name."""
        consumer = ReplicaConsumer(self._manager.another(), self)
        self.fleet.add(consumer)
        return consumer.name

    def waiting_for_devices(self) -> int:
        """Return the number of replicas that have yet to reserve their devices."""
        return sum(not consumer.replica.has_devices for consumer in self._consumers())

    def nodes_of(self, name: str) -> Sequence[str]:
        """Return the Ray nodes of a replica, if they are known."""
        return next((one.nodes for one in self._consumers() if one.name == name), ())

    def _consumers(self) -> list[ReplicaConsumer]:
        found = [self.fleet.consumer(member.name) for member in self.fleet.members]
        return [one for one in found if isinstance(one, ReplicaConsumer)]

    @staticmethod
    def ask_nodes(replica: Any) -> list[Any]:
        """Ask the servers of a replica for their nodes; return the pending answers."""
        return [server.__ray_call__.remote(node_id) for server in replica.servers]

    def _nodes_of(self, replica: Any) -> list[str]:
        what = f"replica {replica.replica_rank} to name its node"
        nodes: list[str] = got(self.ask_nodes(replica), ASK_S, owner="the trainer", what=what)
        return nodes

    def has_copy(self, name: str, nodes: Sequence[str]) -> None:
        """Note the Ray nodes of a copy of the policy, which loads versions like the replicas."""
        self._copies[name] = nodes

    def memories_for(self, ticket: WeightTicket) -> HostMemories:
        """Return the memory services of all hosts with consumers, from which each consumer gets a version."""
        nodes = [one.nodes for one in self._consumers()] + list(self._copies.values())
        return self._memory.on(
            [node for some in nodes for node in some], [share.host for share in ticket.shares]
        )

    @property
    def replicas(self) -> Sequence[Any]:
        replicas: Sequence[Any] = self._manager.get_replicas()
        return replicas

    def weights(self, owner: str) -> AbstractAsyncContextManager[None]:
        """Hold the weights: no replica changes version until this is left. Raises WaitTimeout."""
        return self.fleet.weights(owner)

    @property
    def versions(self) -> Mapping[str, int]:
        """Return the version that each serving replica serves, by name; a fenced replica is not listed."""
        return self.fleet.versions

    async def publish(self, ticket: WeightTicket) -> Publication:
        """Have every replica check, load and verify a version; return when all working replicas serve it.

        Raises the last replica's error, or WaitTimeout naming the replica that did not respond, if none
        is left and none returns.
        """
        outcome = await self.fleet.publish(ticket)
        return Publication(
            version=ticket.version,
            num_bytes=ticket.num_bytes,
            gather_s=ticket.gather_s,
            replicas=len(outcome.reports),
            failure="; ".join(f"{name}: {why}" for name, why in outcome.failures.items()),
            **vars(LoadReport.total(outcome.reports)),
        )

    async def retire(self, version: int) -> None:
        """Prepare for the memory of `version`, and of all older ones, to be overwritten.

        Raises WaitTimeout if a replica that reads it cannot be ended.
        """
        await self.fleet.retire(version)

    async def watch(self) -> None:
        """Fence replicas that stop working between updates. Never returns; raises like `publish`."""
        await self.fleet.watch()

    async def close(self) -> None:
        """Cancel pending loads and restarts of replicas, and unlink the memory of all hosts."""
        await self.fleet.close()
        await self._memory.close()
