# SPDX-License-Identifier: Apache-2.0
"""Replicas that join and leave during a run: on request, or where the Ray cluster has free devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.knobs.schema import FleetConfig
from ...core.waits.deadline import within
from ...errors import WeightSyncError
from ...observe.run_directory import replica_requests
from ...observe.run_directory.summary import write_atomically
from ...weight_sync.fleet.keeper import describe_error
from ...weight_sync.fleet.registry import ConsumerState

if TYPE_CHECKING:
    from .replica_pool import RolloutPool

LOOK_EVERY_S = 1.0
"""Interval at which the trainer looks for requests."""
GROW_EVERY_S = 10.0
"""Interval at which it looks for free devices."""
DRAIN_S = 600.0
"""Time for a replica that is removed to finish its open requests."""
COUNT_S = 5.0
"""Deadline for a replica to count its open requests, for a list of the replicas."""


class Elasticity:
    """Takes requests about the replicas of a run, and adds replicas up to the configured number."""

    def __init__(
        self,
        pool: RolloutPool,
        run_dir: Path,
        settings: FleetConfig,
        say: Callable[[str], None],
        calls: Callable[..., Any],
        nodes: Callable[[], dict[str, tuple[str, int]]],
        nodes_of_a_replica: int = 1,
    ) -> None:
        """`calls` runs a function in a thread. `nodes` returns for each Ray node its address and the number
        of replicas that fit on its free devices, or of parts of replicas that take several nodes; it blocks.
        """
        self._pool, self._fleet, self._say = pool, pool.fleet, say
        self._folder, self._calls, self._nodes = run_dir / replica_requests.FOLDER, calls, nodes
        self._nodes_of_a_replica = nodes_of_a_replica
        self._settings, self._most = settings, settings.max_replicas
        self._grown: set[str] = set()
        """Replicas that were added without a request and have not served yet."""
        self._barred: set[str] = set()
        """Nodes of the cluster when such a replica failed; it is not repeated before a node joins."""
        self._reported = ""

    async def run(self) -> None:
        """Take requests and grow. Never returns, and raises nothing that would end the run."""
        looks, is_open, to_grow = 0, False, round(GROW_EVERY_S / LOOK_EVERY_S)
        try:
            while True:
                try:
                    if not is_open:
                        await self._calls(replica_requests.open_folder, self._folder)
                        is_open = True
                    await self._answer_requests()
                    if looks and self._settings.max_replicas and looks % to_grow == 0:
                        await self._grow()
                except Exception as error:  # noqa: BLE001  a run does not end because it cannot grow
                    self._report(describe_error(error))
                await asyncio.sleep(LOOK_EVERY_S)
                looks += 1
        finally:
            with suppress(OSError):  # there may be files of others
                replica_requests.close_folder(self._folder)

    def _report(self, problem: str) -> None:
        if problem != self._reported:
            self._reported = problem
            self._say(f"replicas cannot be listed, added or removed: {problem}")

    async def _answer_requests(self) -> None:
        for path, request in await self._calls(replica_requests.take, self._folder):
            try:
                answer = await self._carry_out(request)
            except (WeightSyncError, KeyError, TypeError, ValueError) as error:
                answer = {"error": str(error)}
            await self._calls(write_atomically, path, answer)

    async def _carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        nodes = await self._calls(self._nodes)
        done: dict[str, Any] = {}
        if request.get("action") == "add":
            done["added"] = self._add(int(request["count"]), self._free(nodes))
        elif request.get("action") == "remove":
            name = str(request["name"])
            self._fleet.remove(name, DRAIN_S)
            self._most = max(0, self._most - 1)
            done["removed"] = name
        return {**done, "max_replicas": self._settings.max_replicas, "replicas": await self._list(nodes)}

    def _add(self, count: int, free: int) -> list[str]:
        most, there = self._settings.max_replicas, self._count()
        if count < 1:
            raise WeightSyncError(f"--add must be >= 1, got {count}; use 1 or more")
        if most and there + count > most:
            raise WeightSyncError(
                f"{FleetConfig.PATH}.max_replicas is {most} and there are {there} replicas, so {count} more "
                "are too many; add fewer, or start the run with a larger max_replicas"
            )
        if count > free:
            raise WeightSyncError(
                f"{count} more replicas do not fit: the free devices of the Ray cluster's nodes have room "
                f"for {free}; add nodes or fewer replicas"
            )
        self._most = min(most, self._most + count)
        return [self._pool.add_replica() for _ in range(count)]

    async def _grow(self) -> None:
        failed = {name for name in self._grown if self._fleet.has_left(name)}
        nodes = await self._calls(self._nodes)
        if failed:
            self._barred = set(nodes)
        self._grown -= failed
        if self._barred >= set(nodes):
            return
        self._barred = set()
        for _ in range(min(self._most - self._count(), self._free(nodes))):
            self._grown.add(self._pool.add_replica())

    def _free(self, nodes: dict[str, tuple[str, int]]) -> int:
        """Return how many replicas fit, without the devices that a starting one has yet to reserve."""
        fitting = sum(fits for _, fits in nodes.values()) // self._nodes_of_a_replica
        return max(0, fitting - self._pool.waiting_for_devices())

    def _count(self) -> int:
        return sum(member.state is not ConsumerState.LEAVING for member in self._fleet.members)

    async def _list(self, nodes: dict[str, tuple[str, int]]) -> list[dict[str, Any]]:
        members = self._fleet.members
        counted = await asyncio.gather(*(self._open_requests(member.name) for member in members))
        return [
            {
                "name": member.name,
                "node": ", ".join(nodes.get(node, (node, 0))[0] for node in self._pool.nodes_of(member.name)),
                "state": member.state.name.lower(),
                "version": member.version,
                "open_requests": requests,
                "load_s": round(member.load_s, 6) if member.num_loads else None,
                "why": member.why,
            }
            for member, requests in zip(members, counted, strict=True)
        ]

    async def _open_requests(self, name: str) -> int | None:
        """Return the number of open requests, or None if the replica does not answer."""
        try:
            counting = self._fleet.consumer(name).open_requests()
            return await within(counting, COUNT_S, owner="the pipeline", what=f"{name} to count its requests")
        except Exception:  # noqa: BLE001  a replica that does not answer is listed without it
            return None
