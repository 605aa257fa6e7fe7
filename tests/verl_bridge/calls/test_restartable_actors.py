# SPDX-License-Identifier: Apache-2.0
"""Ray can restart a worker with any constructor arguments; with real Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import ray

from recipe.async_pipeline.verl_bridge.calls import ray_calls
from tests import HANG_S
from tests.conftest import Load
from tests.fakes.ray_nodes import start_ray

pytestmark = pytest.mark.real_engine

LARGE = 1 << 20
"""Bytes; Ray passes arguments above 100 kB through its object store."""


@pytest.fixture
def module(load: Load) -> Iterator[ModuleType]:
    module = load("recipe.async_pipeline.verl_bridge.calls.ray_calls")
    start_ray()
    try:
        yield module
    finally:
        ray.shutdown()


class Worker:
    def __init__(self, config: bytes, address: str | None) -> None:
        self.size = len(config)
        self.said: list[str] = []
        vars(ray_calls)["say"] = self.said.append
        ray_calls.say_if_restarted()

    def what_it_said(self) -> list[str]:
        return self.said

    def report(self) -> tuple[int, int]:
        return self.size, os.getpid()

    def die(self) -> None:
        os._exit(1)


def test_a_worker_with_a_large_config_can_restart_repeatedly(module: ModuleType) -> None:
    config = bytes(LARGE)
    workers = module.restartable(Worker, 2)
    first, second = (workers.options(name=f"worker_{i}").remote(config, None) for i in range(2))
    assert len(workers._kept) == 2, "the config is stored once for both, and the address"
    pids = set()
    for _ in range(2):
        size, pid = ray.get(first.report.remote(), timeout=HANG_S)
        assert size == LARGE
        pids.add(pid)
        first.die.options(max_task_retries=0).remote()
        size, pid = ray.get(first.report.remote(), timeout=HANG_S)
        pids.add(pid)
    assert len(pids) == 3
    (said,) = ray.get(first.what_it_said.remote(), timeout=HANG_S)
    assert said.startswith("worker_0 was started again")
    assert ray.get(second.what_it_said.remote(), timeout=HANG_S) == []
    assert ray.get(second.report.remote(), timeout=HANG_S)[0] == LARGE
