# SPDX-License-Identifier: Apache-2.0
"""A flood opens more requests than a server runs at once, and its control calls continue; with real Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import ray

from recipe.async_pipeline.verl_bridge.calls.control_calls import CONTROL, GROUPS, ControlCalls, control
from tests import HANG_S
from tests.conftest import Load
from tests.fakes.ray_nodes import start_ray

pytestmark = pytest.mark.real_engine

REQUESTS, AT_ONCE = 300, 32


class Server(ControlCalls):
    """Its requests end when it has been checked twice while as many are open as may be."""

    def __init__(self, fails: bool = False) -> None:
        self.open = self.checks = 0
        self.fails, self.over = fails, asyncio.Event()

    async def launch_server(self) -> None:
        self.serve_control_calls()

    async def generate(
        self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> str:
        self.open += 1
        await self.over.wait()
        if self.fails:
            raise ValueError(request_id)
        return request_id

    @control(CONTROL)
    async def check(self) -> None:
        self.checks += self.open >= AT_ONCE
        if self.checks >= 2:
            self.over.set()


@pytest.fixture(scope="module")
def flood(load: Load) -> Iterator[ModuleType]:
    start_ray(namespace="elsewhere")
    try:
        yield load("recipe.async_pipeline.lab.soak.flood")
    finally:
        ray.shutdown()


def started(**options: Any) -> Any:
    server = (
        ray.remote(concurrency_groups=dict(GROUPS))(Server)
        .options(max_concurrency=AT_ONCE, num_cpus=0, **options)
        .remote(fails="fails" in options.get("name", ""))
    )
    ray.get(server.launch_server.remote(), timeout=HANG_S)
    return server


def test_no_request_is_lost_and_checks_do_not_wait(flood: ModuleType) -> None:
    with pytest.raises(flood.FloodFailed, match="no rollout server has a name"):
        flood.server_at(0.5)
    other = started(name="agent_loop_worker_0_0", namespace="job")
    server = started(name="vllm_server_1_0_2", namespace="job")
    try:
        found = flood.flood(flood.server_at(0.99), REQUESTS, HANG_S)
        assert (found["requests"], found["lost"]) == (REQUESTS, 0)
        assert found["checks"] >= 2
        assert 0 < found["check_p50_s"] <= found["check_p99_s"] < HANG_S
    finally:
        ray.kill(server)
        ray.kill(other)


def test_lost_requests_are_counted(flood: ModuleType) -> None:
    server = started(name="fails")
    try:
        assert flood.flood(server, AT_ONCE, HANG_S)["lost"] == AT_ONCE
    finally:
        ray.kill(server)


def test_a_dead_server_is_reported(flood: ModuleType) -> None:
    server = started()
    ray.kill(server)
    with pytest.raises(flood.FloodFailed, match="a check failed during the flood"):
        flood.flood(server, 1, HANG_S)
