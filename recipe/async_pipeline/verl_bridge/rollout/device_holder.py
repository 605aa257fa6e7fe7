# SPDX-License-Identifier: Apache-2.0
"""Reserve the devices of a rollout replica, so that Ray assigns them to no other actor.

verl uses a weight-receiving worker for this, which imports the whole rollout stack and joins a process
group. Here the engine itself receives the weights, so an empty actor suffices, and starts at once. The
actor's process imports this module, so it imports neither verl nor torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any

import psutil
import ray

from ...weight_sync.hosts.host_slots import running


class DeviceReservation:
    """The actor. Start it with `num_gpus`."""

    def where(self) -> tuple[str, dict[str, list[str]]]:
        """Return Ray's node id and the ids of this actor's accelerators, by resource name."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()

    def end(self, processes: Sequence[tuple[int, float]]) -> int:
        """Kill processes of this host if their start times still match; return how many were killed."""
        found = 0
        for pid, started in processes:
            process = running(pid, started)
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    found += 1
        return found


class ReservedDevice:
    """One reserved device, where verl expects a worker's handle."""

    def __init__(self, holder: Any, resource: str) -> None:
        """`resource` is Ray's name of the accelerator, e.g. GPU."""
        self._holder = holder
        self._resource = resource

    @property
    def __ray_call__(self) -> ReservedDevice:
        """Accept the function that verl sends to a worker to learn its place; `remote` needs no function."""
        return self

    def remote(self, function: Any) -> Awaitable[tuple[str, str]]:
        """Return the result of verl's function: node id and device id."""
        return self.where()

    async def where(self) -> tuple[str, str]:
        """Return node id and device id."""
        node, devices = await self._holder.where.remote()
        return node, devices[self._resource][0]

    async def end(self, processes: Sequence[tuple[int, float]]) -> int:
        """Kill processes; see `DeviceReservation.end`."""
        found: int = await self._holder.end.remote(processes)
        return found

    def release(self) -> None:
        """End the reservation."""
        ray.kill(self._holder)


def node_id(actor: Any) -> str:
    """Return the Ray node that this runs on. Sent to any actor; importing it costs the actor nothing."""
    node: str = ray.get_runtime_context().get_node_id()
    return node
