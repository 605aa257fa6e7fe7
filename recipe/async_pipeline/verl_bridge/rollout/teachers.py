# SPDX-License-Identifier: Apache-2.0
"""Keep the replicas of teachers up: verl starts them, and does not restart one whose process died."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf

from ...config.checks.teachers import MODELS, servers_of
from ...core.waits.deadline import all_of, within
from ...weight_sync.fleet.keeper import ASK_S, ATTEMPTS, CHECK_EVERY_S, MEMORY_S, back_off_s, describe_error
from .client import PipelineLLMClient
from .teacher_server import TeacherServer

SINGLE = "default"
"""verl's key of a single teacher."""


@dataclass(frozen=True)
class TeacherReplica:
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
        """`managers`: verl's `TeacherModelManager` of each teacher that this run serves, by its key. `note`
        gets FENCED and REJOINED, and the replica.
        """
        self._managers, self._say, self._note = managers, say, note
        self._restart_timeout_s, self._starts = restart_timeout_s, itertools.count(1)

    def clients(self, config: DictConfig) -> dict[str, PipelineLLMClient | TeacherServer] | None:
        """Return what sends requests to each teacher, by its key; None in a run without any."""
        elsewhere = {
            str(OmegaConf.select(config, f"{MODELS}.{name}.key") or SINGLE): TeacherServer(
                url, self._restart_timeout_s
            )
            for name, url in servers_of(config).items()
        }
        here = {
            key: PipelineLLMClient(config=config, load_balancer_handle=manager.load_balancer_handle)
            for key, manager in self._managers.items()
        }
        return elsewhere | here or None

    async def watch(self) -> None:
        """Restart replicas that stop working, on their devices. Never returns.

        Raises the error of a replica that does not return.
        """
        await all_of(*(self._keep(one) for one in self._all()))

    def _all(self) -> Iterator[TeacherReplica]:
        for key, manager in self._managers.items():
            for replica in manager.rollout_replicas:
                name = f"replica {replica.replica_rank} of teacher {key}"
                yield TeacherReplica(name, replica, replica.name_suffix, manager.load_balancer_handle)

    async def _keep(self, one: TeacherReplica) -> None:
        now, falls = asyncio.get_running_loop().time, list[float]()
        while True:
            why = await self._until_broken(one)
            falls = [*(at for at in falls if now() - at < MEMORY_S), now()]
            self._note("FENCED", replica=one.name)
            self._say(f"{one.name} restarts. {why}")
            gone = one.balancer.remove_servers.remote([one.replica._server_address])
            await within(gone, ASK_S, owner=one.name, what="the balancer to remove it")
            for attempt in range(1, ATTEMPTS + 1):
                await asyncio.sleep(back_off_s(len(falls) + attempt - 1))
                try:
                    await self._start(one)
                    break
                except Exception as error:
                    failed = f"did not return (attempt {attempt} of {ATTEMPTS})"
                    self._say(f"{one.name} {failed}. {describe_error(error)}")
                    if attempt == ATTEMPTS:
                        raise
            servers = {one.replica._server_address: one.replica._server_handle}
            added = one.balancer.add_servers.remote(servers)
            await within(added, ASK_S, owner=one.name, what="the balancer to add it")
            self._note("REJOINED", replica=one.name)
            self._say(f"{one.name} reads again")

    async def _until_broken(self, one: TeacherReplica) -> str:
        """Return why a replica does not work, once it does not."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            answers = asyncio.gather(*(one.__ray_call__.remote(_error) for one in one.replica.servers))
            try:
                errors = await within(
                    answers, self._restart_timeout_s, owner="the pipeline", what=f"{one.name} to respond"
                )
            except Exception as error:  # noqa: BLE001  it restarts after any error
                return describe_error(error)
            if broken := next(filter(None, errors), None):
                return str(broken)

    async def _start(self, one: TeacherReplica) -> None:
        """Start the servers of a replica, after ending what is left of them. Raises WaitTimeout, or what ends
        its processes.
        """
        replica = one.replica
        for server in replica.servers:
            ray.kill(server)
        replica.servers = []
        # Ray may still hold the old names.
        replica.name_suffix = f"{one.suffix}_{next(self._starts)}"
        starting, what = replica.launch_servers(), f"{one.name} to restart"
        await within(starting, self._restart_timeout_s, owner="the pipeline", what=what)


def _error(server: Any) -> str:
    """Return why the engine of verl's server is dead, where the server lives on: vLLM's does. Runs there."""
    engine = getattr(server, "engine", None)
    return str(getattr(engine, "dead_error", "")) if getattr(engine, "errored", False) else ""
