# SPDX-License-Identifier: Apache-2.0
"""Keep the replicas of teachers up: verl starts them, and does not restart one whose process died."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from omegaconf import DictConfig

from ...core.waits.deadline import all_of, within
from ...weight_sync.fleet.keeper import ASK_S, ATTEMPTS, CHECK_EVERY_S, MEMORY_S, back_off_s, describe_error
from .client import PipelineLLMClient


@dataclass(frozen=True)
class Reader:
    """One replica of a teacher."""

    name: str
    replica: Any
    """verl's, whose servers have started."""
    suffix: str
    """Of the names of its first servers."""
    balancer: Any
    """Knows the replicas of this teacher."""


class Teachers:
    """All replicas of all teachers. A request whose replica died goes to another one of its teacher, or waits
    until one has returned; see `PipelineLLMClient`.
    """

    def __init__(
        self,
        managers: Mapping[str, Any],
        say: Callable[[str], None],
        note: Callable[..., None],
        restart_timeout_s: float,
    ) -> None:
        """`managers`: verl's `TeacherModelManager` of each teacher, by its key. `note` gets FENCED and
        REJOINED, and the replica.
        """
        self._managers, self._say, self._note = managers, say, note
        self._restart_timeout_s, self._starts = restart_timeout_s, itertools.count(1)

    def clients(self, config: DictConfig) -> dict[str, PipelineLLMClient]:
        """Return what sends requests to each teacher, by its key."""
        return {
            key: PipelineLLMClient(config=config, load_balancer_handle=manager.load_balancer_handle)
            for key, manager in self._managers.items()
        }

    async def watch(self) -> None:
        """Restart replicas that stop working, on their devices. Never returns.

        Raises the error of a replica that does not return.
        """
        await all_of(*(self._keep(one) for one in self._readers()))

    def _readers(self) -> Iterator[Reader]:
        for key, manager in self._managers.items():
            for replica in manager.rollout_replicas:
                name = f"replica {replica.replica_rank} of teacher {key}"
                yield Reader(name, replica, replica.name_suffix, manager.load_balancer_handle)

    async def _keep(self, reader: Reader) -> None:
        now, falls = asyncio.get_running_loop().time, list[float]()
        while True:
            why = await self._until_broken(reader)
            falls = [*(at for at in falls if now() - at < MEMORY_S), now()]
            self._note("FENCED", replica=reader.name)
            self._say(f"{reader.name} restarts. {why}")
            gone = reader.balancer.remove_servers.remote([reader.replica._server_address])
            await within(gone, ASK_S, owner=reader.name, what="the balancer to remove it")
            for attempt in range(1, ATTEMPTS + 1):
                await asyncio.sleep(back_off_s(len(falls) + attempt - 1))
                try:
                    await self._start(reader)
                    break
                except Exception as error:
                    failed = f"did not return (attempt {attempt} of {ATTEMPTS})"
                    self._say(f"{reader.name} {failed}. {describe_error(error)}")
                    if attempt == ATTEMPTS:
                        raise
            servers = {reader.replica._server_address: reader.replica._server_handle}
            added = reader.balancer.add_servers.remote(servers)
            await within(added, ASK_S, owner=reader.name, what="the balancer to add it")
            self._note("REJOINED", replica=reader.name)
            self._say(f"{reader.name} reads again")

    async def _until_broken(self, reader: Reader) -> str:
        """Return why a replica does not work, once it does not."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            answers = asyncio.gather(*(one.__ray_call__.remote(_error) for one in reader.replica.servers))
            try:
                errors = await within(
                    answers, self._restart_timeout_s, owner="the pipeline", what=f"{reader.name} to respond"
                )
            except Exception as error:  # noqa: BLE001  it restarts after any error
                return describe_error(error)
            if broken := next(filter(None, errors), None):
                return str(broken)

    async def _start(self, reader: Reader) -> None:
        """Start the servers of a replica, after ending what is left of them. Raises WaitTimeout, or what ends
        its processes.
        """
        replica = reader.replica
        for server in replica.servers:
            ray.kill(server)
        replica.servers = []
        # Ray may still hold the old names.
        replica.name_suffix = f"{reader.suffix}_{next(self._starts)}"
        starting, what = replica.launch_servers(), f"{reader.name} to restart"
        await within(starting, self._restart_timeout_s, owner="the pipeline", what=what)


def _error(server: Any) -> str:
    """Return why the engine of verl's server is dead, where the server lives on: vLLM's does. Runs there."""
    engine = getattr(server, "engine", None)
    return str(getattr(engine, "dead_error", "")) if getattr(engine, "errored", False) else ""
