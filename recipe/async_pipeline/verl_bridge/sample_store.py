# SPDX-License-Identifier: Apache-2.0
"""TransferQueue without what it repeats in every request.

For each put, get and clear it counts the machine's cores, from a file for each of them, and warns if there
are fewer than its eight threads. Ray carries the warning to the driver.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import ray
from transfer_queue import client
from transfer_queue.storage import simple_storage
from transfer_queue.storage.bootstrap import simple_storage_bootstrap
from transfer_queue.utils import common

_StockUnit: Any = simple_storage.SimpleStorageUnit.__ray_metadata__.modified_class.__ray_actor_class__
"""The plain class of TransferQueue's actor class, which Ray forbids to inherit from."""


def count_cores_once() -> None:
    """Count the cores for all requests of this process, and use no more threads than there are cores."""
    cores = psutil.cpu_count(logical=False) or 1
    common.psutil = SimpleNamespace(cpu_count=lambda logical=True: cores)
    for module in (client, simple_storage):
        module.TQ_NUM_THREADS = min(module.TQ_NUM_THREADS, cores)


class PipelineSimpleStorageUnit(_StockUnit):  # type: ignore[misc]
    """TransferQueue's storage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        count_cores_once()
        super().__init__(*args, **kwargs)


def install() -> None:
    """Have `transfer_queue.init` start our storage; it looks the class up by this name only."""
    options = simple_storage.SimpleStorageUnit._default_options
    simple_storage_bootstrap.SimpleStorageUnit = ray.remote(**options)(PipelineSimpleStorageUnit)
