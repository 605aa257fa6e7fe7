# SPDX-License-Identifier: Apache-2.0
"""A request to TransferQueue neither counts the cores of the machine nor warns about their number."""

from __future__ import annotations

import logging
import random
from types import ModuleType
from typing import Any

import psutil
import pytest

from recipe.async_pipeline.verl_bridge import replaced
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


def users(load: Load) -> tuple[ModuleType, ModuleType]:
    return load("transfer_queue.client"), load("transfer_queue.storage.simple_storage")


@pytest.fixture
def store(load: Load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("recipe.async_pipeline.verl_bridge.sample_store")
    common = load("transfer_queue.utils.common")
    monkeypatch.setattr(common, "psutil", psutil)
    for user in users(load):
        monkeypatch.setattr(user, "TQ_NUM_THREADS", 8)
    return module


@pytest.mark.parametrize("cores", [2, 64])
def test_the_cores_are_counted_once(
    load: Load,
    store: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cores: int,
) -> None:
    counted: list[bool] = []

    def count(logical: bool = True) -> int:
        counted.append(logical)
        return cores

    monkeypatch.setattr(psutil, "cpu_count", count)
    store.count_cores_once()
    with caplog.at_level(logging.WARNING):
        for user in users(load):
            assert user.TQ_NUM_THREADS == min(8, cores)
            with user.limit_pytorch_auto_parallel_threads(target_num_threads=user.TQ_NUM_THREADS):
                pass
    assert counted == [False]
    assert not caplog.records


def test_init_starts_the_classes_of_this_package(
    load: Load, store: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap = load("transfer_queue.storage.bootstrap.simple_storage_bootstrap")
    interface = load("transfer_queue.interface")
    places = [
        (bootstrap, "SimpleStorageUnit", store.PipelineSimpleStorageUnit),
        (interface, "TransferQueueController", store.PipelineTransferQueueController),
    ]
    stock = {name: getattr(module, name) for module, name, _ in places}
    for module, name, _ in places:
        monkeypatch.setattr(module, name, stock[name])
    replaced.apply("sample store")
    for module, name, ours in places:
        made: Any = getattr(module, name)
        assert issubclass(made.__ray_metadata__.modified_class, ours)
        assert made._default_options == stock[name]._default_options


SHAPES = [(3,), (4,), [3], (3, 2)]


@pytest.mark.parametrize("seed", range(20))
def test_a_column_forgets_samples_as_in_transfer_queue(store: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    kinds = SHAPES[: draw.randint(1, len(SHAPES))]
    ours, theirs = (store.controller.FieldMeta() for _ in range(2))
    for column in (ours, theirs):
        made = random.Random(seed)
        column.update(
            {
                "dtype": "int64",
                "is_nested": True,
                "per_sample_shapes": {i: made.choice(kinds) for i in range(9)},
            },
            list(range(9)),
        )
    left = list(range(9))
    while left:
        removed = draw.sample(left, draw.randint(1, min(3, len(left))))
        left = [index for index in left if index not in removed]
        store.remove_samples(ours, [*removed, 99])
        theirs.remove_samples([*removed, 99])
        assert ours == theirs


def test_a_column_looks_at_few_of_the_remaining_samples(store: ModuleType) -> None:
    seen: list[int] = []

    class Shape(tuple[int, ...]):
        def __eq__(self, other: object) -> bool:
            seen.append(1)
            return super().__eq__(other)

        __hash__ = tuple.__hash__

    column = store.controller.FieldMeta()
    shapes = {index: Shape((index % 2,)) for index in range(1000)}
    column.update({"dtype": "int64", "is_nested": True, "per_sample_shapes": shapes}, list(shapes))
    store.remove_samples(column, [0])
    assert len(seen) < 5
