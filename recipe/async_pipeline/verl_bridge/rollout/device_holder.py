# SPDX-License-Identifier: Apache-2.0
"""Holds the devices of a rollout replica, so that Ray gives them to nobody else.

verl uses a weight-receiving worker for that, which imports the whole rollout stack and a process group.
Ours receives weights in the engine itself, so an actor that does nothing will do, and starts at once.
This module is imported in that actor: it imports neither verl nor torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any

import psutil
import ray


class DeviceHolder:
    """The actor. Reserve it with `num_gpus`."""

    def where(self) -> tuple[str, dict[str, list[str]]]:
        """Ray's node id, and the ids of the accelerators that this actor holds, by resource name."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()

    def end(self, processes: Sequence[tuple[int, float]]) -> int:
        """Kill these processes of this host, if they are still the ones that started then. Returns how
        many were.
        """
        found = 0
        for pid, started in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == started:
                    process.kill()
                    found += 1
        return found


class HeldDevice:
    """One held device, in the place where verl expects a worker's handle."""

    def __init__(self, holder: Any, resource: str) -> None:
        """`resource`: Ray's name of the accelerator, e.g. GPU."""
        self._holder = holder
        self._resource = resource

    @property
    def __ray_call__(self) -> HeldDevice:
        """verl asks a worker where it runs by sending it a function; the answer needs no such thing."""
        return self

    def remote(self, function: Any) -> Awaitable[tuple[str, str]]:
        """What verl's function would return: node id and id of the device."""
        return self.where()

    async def where(self) -> tuple[str, str]:
        """Node id and id of the device."""
        node, devices = await self._holder.where.remote()
        return node, devices[self._resource][0]

    async def end(self, processes: Sequence[tuple[int, float]]) -> int:
        """See `DeviceHolder.end`."""
        found: int = await self._holder.end.remote(processes)
        return found


def node_id(actor: Any) -> str:
    """To be sent to any actor: the Ray node that it runs on. Importing this costs the actor nothing."""
    node: str = ray.get_runtime_context().get_node_id()
    return node
