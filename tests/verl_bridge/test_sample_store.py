# SPDX-License-Identifier: Apache-2.0
"""A request to TransferQueue neither counts the cores of the machine nor warns about their number."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture
def store(load: Load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("recipe.async_pipeline.verl_bridge.sample_store")
    monkeypatch.setattr(module.common, "psutil", psutil)
    for user in (module.client, module.simple_storage):
        monkeypatch.setattr(user, "TQ_NUM_THREADS", 8)
    return module


@pytest.mark.parametrize("cores", [2, 64])
def test_the_cores_are_counted_once(
    store: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cores: int
) -> None:
    counted: list[bool] = []

    def count(logical: bool = True) -> int:
        counted.append(logical)
        return cores

    monkeypatch.setattr(psutil, "cpu_count", count)
    store.count_cores_once()
    with caplog.at_level(logging.WARNING):
        for user in (store.client, store.simple_storage):
            assert user.TQ_NUM_THREADS == min(8, cores)
            with user.limit_pytorch_auto_parallel_threads(target_num_threads=user.TQ_NUM_THREADS):
                pass
    assert counted == [False]
    assert not caplog.records


def test_init_starts_the_storage_of_this_package(store: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap = store.simple_storage_bootstrap
    monkeypatch.setattr(bootstrap, "SimpleStorageUnit", bootstrap.SimpleStorageUnit)
    stock = bootstrap.SimpleStorageUnit
    store.install()
    ours: Any = bootstrap.SimpleStorageUnit
    assert issubclass(ours.__ray_metadata__.modified_class, store.PipelineSimpleStorageUnit)
    assert ours._default_options == stock._default_options
