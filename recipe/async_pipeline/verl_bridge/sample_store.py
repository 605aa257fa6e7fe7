# SPDX-License-Identifier: Apache-2.0
"""TransferQueue without what it repeats in every request.

For each put, get and clear it counts the machine's cores, from a file for each of them, and warns if there
are fewer than its eight threads. Ray carries the warning to the driver. For each clear, its controller looks
at all samples that remain, which takes most of its time in a step of 16,384 responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import ray
from transfer_queue import controller
from transfer_queue.storage import simple_storage

from . import replaced

_StockUnit: Any = simple_storage.SimpleStorageUnit.__ray_metadata__.modified_class.__ray_actor_class__
_StockController: Any = controller.TransferQueueController.__ray_metadata__.modified_class.__ray_actor_class__
"""The plain classes of TransferQueue's actor classes, which Ray forbids to inherit from."""


def count_cores_once() -> None:
    """Count the cores for all requests of this process, and use no more threads than there are cores."""
    replaced.apply("sample store client", cores=psutil.cpu_count(logical=False) or 1)


def counted_once(stock: Any, cores: int) -> Any:
    """Return the part of `psutil` that TransferQueue uses."""
    return SimpleNamespace(cpu_count=lambda logical=True: cores)


def at_most_cores(threads: int, cores: int) -> int:
    """Return the number of threads to use."""
    return min(threads, cores)


class PipelineSimpleStorageUnit(_StockUnit):  # type: ignore[misc]
    """TransferQueue's storage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        count_cores_once()
        super().__init__(*args, **kwargs)


class PipelineTransferQueueController(_StockController):  # type: ignore[misc]
    """TransferQueue's controller."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        replaced.apply("sample store controller")
        super().__init__(*args, **kwargs)


def remove_samples(column: Any, indexes: Sequence[int]) -> None:
    """Forget samples of a column, a `FieldMeta`, as its method `remove_samples` does.

    A column is no longer nested if all remaining samples have one shape. The search for two shapes ends with
    the second one instead of the last sample.
    """
    shapes = column.per_sample_shapes
    for index in indexes:
        shapes.pop(index, None)
    column.global_indexes.difference_update(indexes)

    if not column.global_indexes:
        column.is_nested = column.is_non_tensor = column.shape = column.dtype = None
        shapes.clear()
    elif column.is_nested and shapes:
        remaining = (tuple(shape) if isinstance(shape, list) else shape for shape in shapes.values())
        first = next(remaining)
        if all(shape == first for shape in remaining):
            column.is_nested, column.shape = False, first
            shapes.clear()


def storage_actor(stock: Any) -> Any:
    """Return our storage as an actor class with the options of TransferQueue's."""
    return ray.remote(**stock._default_options)(PipelineSimpleStorageUnit)


def controller_actor(stock: Any) -> Any:
    """Return our controller as an actor class with the options of TransferQueue's."""
    return ray.remote(**stock._default_options)(PipelineTransferQueueController)
