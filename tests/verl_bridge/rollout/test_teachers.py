# SPDX-License-Identifier: Apache-2.0
"""A replica of a teacher that stops working starts again on its devices, and returns to the balancer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.core.waits.clock import run_virtual
from tests.conftest import Load

pytestmark = [pytest.mark.real_engine, pytest.mark.virtual_time]


class Call:
    """`actor.method.remote(...)`, awaitable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        async def call() -> Any:
            return await self._function(*args)

        return asyncio.ensure_future(call())


class Server:
    """The handle of verl's server, which is dead, hangs, or has a dead engine, as told."""

    def __init__(self) -> None:
        self.state, self.killed = "up", False
        self.engine = SimpleNamespace(errored=False, dead_error=RuntimeError("engine core died"))
        self.__ray_call__ = Call(self._call)

    async def _call(self, function: Callable[[Any], Any]) -> Any:
        if self.state == "hangs":
            await asyncio.sleep(10_000)
        if self.state == "dead":
            raise RuntimeError("the actor died")
        self.engine.errored = self.state == "engine"
        return function(self)


class Replica:
    """verl's replica; `refuses`: so many starts fail."""

    replica_rank, name_suffix = 0, "_sums"

    def __init__(self, refuses: int) -> None:
        self.names: list[str] = []
        self._refuses = refuses
        self.servers = [Server()]
        self._server_address, self._server_handle = "first", self.servers[0]

    async def launch_servers(self) -> None:
        assert not self.servers
        self.names.append(self.name_suffix)
        await asyncio.sleep(5)
        self.servers = [Server()]
        if len(self.names) <= self._refuses:
            raise RuntimeError("no memory")
        self._server_address, self._server_handle = f"again {len(self.names)}", self.servers[0]


class Watched:
    """A teacher of one replica, which is watched for two minutes."""

    def __init__(self, load: Load, monkeypatch: pytest.MonkeyPatch, refuses: int = 0) -> None:
        self._module = load("recipe.async_pipeline.verl_bridge.rollout.teachers")
        monkeypatch.setattr(self._module.ray, "kill", lambda server: setattr(server, "killed", True))
        self.replica, self.listed = Replica(refuses), {"first"}
        self.said: list[str] = []
        self.noted: list[tuple[str, str]] = []

    async def _add(self, servers: dict[str, Any]) -> None:
        self.listed |= servers.keys()

    async def _remove(self, servers: list[str]) -> None:
        self.listed -= set(servers)

    def broken(self, how: str) -> Server:
        """Watch while the server is in this state from the tenth second on; return this server."""
        first: Server = self.replica.servers[0]
        balancer = SimpleNamespace(add_servers=Call(self._add), remove_servers=Call(self._remove))
        manager = SimpleNamespace(rollout_replicas=[self.replica], load_balancer_handle=balancer)

        def note(event: str, replica: str) -> None:
            self.noted.append((event, replica))

        teachers = self._module.Teachers({"sums": manager}, self.said.append, note, 20)

        async def main() -> None:
            watching = asyncio.create_task(teachers.watch())
            await asyncio.sleep(10)
            first.state = how
            await asyncio.wait({watching}, timeout=120)
            if watching.done():
                watching.result()
            watching.cancel()

        run_virtual(main())
        return first


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("dead", "RuntimeError: the actor died"),
        ("engine", "engine core died"),
        ("hangs", "WaitTimeout: the pipeline waited 20 s for replica 0 of teacher sums to respond"),
    ],
)
def test_a_replica_that_stops_working_returns(
    load: Load, monkeypatch: pytest.MonkeyPatch, how: str, why: str
) -> None:
    watched = Watched(load, monkeypatch)
    assert watched.broken(how).killed
    name = "replica 0 of teacher sums"
    assert watched.noted == [("FENCED", name), ("REJOINED", name)]
    assert watched.said == [f"{name} restarts. {why}", f"{name} reads again"]
    assert watched.listed == {"again 1"}


def test_one_that_works_is_left_alone(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(load, monkeypatch)
    assert not watched.broken("up").killed
    assert not watched.noted and watched.listed == {"first"}


def test_a_start_that_fails_is_repeated_under_another_name(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(load, monkeypatch, refuses=2)
    watched.broken("dead")
    assert watched.said[1] == (
        "replica 0 of teacher sums did not return (attempt 1 of 3). RuntimeError: no memory"
    )
    assert watched.listed == {"again 3"}
    assert len(set(watched.replica.names)) == 3 and "_sums" not in watched.replica.names


def test_one_that_does_not_return_ends_the_run(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(load, monkeypatch, refuses=9)
    with pytest.raises(RuntimeError, match="no memory"):
        watched.broken("dead")
    assert watched.said[-1].endswith("(attempt 3 of 3). RuntimeError: no memory")
    assert not watched.listed
