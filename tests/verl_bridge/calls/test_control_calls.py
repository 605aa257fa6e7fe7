# SPDX-License-Identifier: Apache-2.0
"""Control calls begin while any number of requests is open; with real Ray.

No request ends by itself, so a control call that waits for requests never returns.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from recipe.async_pipeline.verl_bridge.calls.control_calls import (
    CONTROL,
    GIVE_UP,
    GROUPS,
    LOAD,
    ControlCalls,
    control,
    server_actor,
)
from recipe.async_pipeline.verl_bridge.cpu import prefork
from tests import HANG_S
from tests.fakes.ray_nodes import start_ray

pytestmark = pytest.mark.real_engine


class Server(ControlCalls):
    """Has requests that end only when they are given up, and the control calls of a replica."""

    def __init__(self) -> None:
        self.requests: dict[int, asyncio.Task[Any]] = {}

    async def launch_server(self) -> None:
        self.serve_control_calls()
        self.loop = asyncio.get_running_loop()

    async def generate(self, request: int) -> str:
        task = asyncio.current_task()
        assert task is not None
        self.requests[request] = task
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "given up"
        finally:
            del self.requests[request]
        raise AssertionError("unreachable")

    @control(CONTROL)
    async def check(self) -> tuple[int, bool]:
        """Return the number of open requests, and whether this runs on their event loop."""
        return len(self.requests), asyncio.get_running_loop() is self.loop

    @control(GIVE_UP)
    async def give_up(self, request: int) -> None:
        self.requests[request].cancel()

    @control(LOAD)
    async def load_version(self, version: int, *, hangs: bool = False) -> int:
        if hangs:
            await asyncio.Event().wait()
        return version

    @ray.method(concurrency_group=CONTROL)
    def processes(self) -> str:
        return "mine"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    start_ray()
    try:
        yield
    finally:
        ray.shutdown()


def started(server_class: Any, max_concurrency: int) -> Any:
    """Start a server with the options that verl starts one with."""
    server = server_class.options(
        runtime_env={"env_vars": {"A": "1"}}, max_concurrency=max_concurrency, num_cpus=0
    ).remote()
    ray.get(server.launch_server.remote(), timeout=HANG_S)
    return server


def answered(ref: Any) -> Any:
    return ray.get(ref, timeout=HANG_S)


def open_on(server: Any, requests: int, at_once: int) -> list[Any]:
    """Open requests; return when as many as may run at once have begun."""
    refs = [server.generate.remote(i) for i in range(requests)]
    while answered(server.check.remote())[0] < min(requests, at_once):
        pass
    return refs


@pytest.mark.parametrize(("requests", "at_once"), [(4096, 1000), (64, 8)])
@pytest.mark.parametrize("early", [False, True], ids=["plain", "started early"])
def test_control_calls_wait_for_no_request(cluster: None, requests: int, at_once: int, early: bool) -> None:
    server_class = server_actor(Server)
    server = started(prefork.started_early(server_class, "of no imports") if early else server_class, at_once)
    try:
        refs = open_on(server, requests, at_once)
        assert answered(server.check.remote()) == (at_once, True)
        assert answered(server.load_version.remote(3)) == 3
        assert answered(server.processes.remote()) == "mine"
        answered(server.give_up.remote(0))
        assert answered(refs[0]) == "given up"
    finally:
        ray.kill(server)


def test_calls_of_one_group_hold_up_no_other_group(cluster: None) -> None:
    server = started(server_actor(Server), 8)
    try:
        refs = open_on(server, 16, 8)
        hanging = [server.load_version.remote(i, hangs=True) for i in range(2 * GROUPS[LOAD])]
        for request, ref in enumerate(refs[:8]):
            answered(server.give_up.remote(request))
            assert answered(ref) == "given up"
        assert answered(server.check.remote())[1]
        assert not ray.wait(hanging, timeout=0)[0]
    finally:
        ray.kill(server)


async def test_in_its_own_process_a_control_call_is_a_plain_call() -> None:
    server = Server()
    assert await server.load_version(1) == 1
    await server.launch_server()
    assert await server.check() == (0, True)


def test_errors_come_back(cluster: None) -> None:
    server = started(server_actor(Server), 8)
    try:
        with pytest.raises(KeyError):
            answered(server.give_up.remote(7))
    finally:
        ray.kill(server)


def test_who_gets_a_handle_does_not_import_the_server(cluster: None) -> None:
    home = __name__

    @ray.remote
    def call(server: Any) -> tuple[int, bool]:
        return ray.get(server.load_version.remote(7)), home in sys.modules

    server = started(server_actor(Server), 8)
    try:
        assert answered(call.remote(server)) == (7, False)
        with pytest.raises(TypeError, match="versions"):
            server.load_version.remote(3, versions=3)
    finally:
        ray.kill(server)
