# SPDX-License-Identifier: Apache-2.0
"""TransferQueue without what it repeats in every request, and its rows in checkpoints.

For each put, get and clear it counts the machine's cores, from a file for each of them, and warns if there
are fewer than its eight threads. Ray carries the warning to the driver. For each clear, its controller looks
at all samples that remain, which takes most of its time in a step of 16,384 responses.

A storage unit writes its own rows into a shard of a checkpoint. It first notes them, which copies nothing;
training may then free them, and the unit keeps them until they are written. A resumed run may have another
number of units: each of them puts the rows of some shards into the store. With a backend without storage
units, the trainer does what they do.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray
import torch
import transfer_queue as tq
from transfer_queue import controller
from transfer_queue.storage import simple_storage

from ...checkpoint import store, tensor_tree
from ...checkpoint.hashed_file import FileEntry
from ...core.groups.items import Group
from ...errors import CheckpointError
from .. import replaced
from ..calls.ray_calls import ASK_S, got
from ..rollout.diffusers.fields import CONDITION, HOLDER
from .sample_columns import SampleColumns, joinable

CONTROLLER = ("TransferQueueController", "transfer_queue")
"""TransferQueue's name and namespace of its controller."""
KEYS_A_CALL = 256
"""Samples per call to the sample store."""
MASK, MASK_AS_STORED = "response_mask", "loss_mask"
"""verl stores the mask of a response under both names. Rollout rejection overwrites the first one."""
Rows = dict[str, dict[str, Any]]
"""Columns by key of a sample."""
WantedRows = tuple[Mapping[str, str], Sequence[tuple[str, int]]]
"""Names of columns, each with the one to read it from; keys of rows with their numbers in the store."""
WriteShard = Callable[[str, str], Awaitable[list[FileEntry]]]
"""Writes a shard, by the folder of the checkpoint and its name, and returns its files."""

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
    """TransferQueue's storage, plus calls through Ray for checkpoints."""

    _noted: Rows = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        count_cores_once()
        super().__init__(*args, **kwargs)

    def note_rows(self, wanted: Sequence[WantedRows]) -> int:
        """Keep the rows that are in this unit until they are written; return their number."""
        self._noted = {}
        for columns, rows in wanted:
            indexes = self.storage_data.field_data.get(next(iter(columns.values())), ())
            own = [(key, index) for key, index in rows if index in indexes]
            if own:
                stored = sorted({*columns.values()})
                data = self.storage_data.get_data(stored, [index for _, index in own])
                self._noted |= _rows([key for key, _ in own], data, columns)
        return len(self._noted)

    def write_rows(self, root: str, shard: str) -> list[FileEntry]:
        """Write the noted rows into a checkpoint. Returns the files."""
        rows, self._noted = self._noted, {}
        return tensor_tree.write_shard(root, shard, rows)

    def restore_rows(
        self, checkpoint: str, shards: Sequence[str], tags: Mapping[str, Any], partition: str
    ) -> list[str]:
        """Put the rows of shards into the store, of which a part goes to other units; return their keys."""
        tq.init()
        return _restored(checkpoint, shards, tags, partition)


class PipelineTransferQueueController(_StockController):  # type: ignore[misc]
    """TransferQueue's controller."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        replaced.apply("sample store controller")
        super().__init__(*args, **kwargs)

    def indexes_of(self, keys: list[str], partition: str) -> list[int | None]:
        """Return the numbers by which storage units know rows, without the rest of their description."""
        found = self._get_partition(partition)
        return [None] * len(keys) if found is None else found.kv_retrieve_indexes(keys)


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


# Checkpoints.


def note(groups: Iterable[Group], partition: str) -> list[WriteShard]:
    """Have each storage unit note its rows of groups. Returns a function for each to write them. Blocks.

    Raises CheckpointError if not all rows are in the units, WaitTimeout if a unit does not answer.
    """
    units = _units()
    if not units:
        rows = fetch(groups, partition)
        return [lambda root, shard: asyncio.to_thread(tensor_tree.write_shard, root, shard, rows)]
    wanted = [
        (columns, [*zip(keys, _indexes_of(keys, partition), strict=True)])
        for columns, keys in _wanted(groups).items()
    ]
    table = ray.put([(dict(columns), rows) for columns, rows in wanted])
    what = "the storage units to note their rows"
    found = sum(got([unit.note_rows.remote(table) for unit in units], ASK_S, owner="train", what=what))
    expected = sum(len(rows) for _, rows in wanted)
    if found != expected:
        raise CheckpointError(f"the storage units have {found} of {expected} rows")
    return [unit.write_rows.remote for unit in units]


def restore(
    checkpoint: Path, shards: Sequence[str], groups: Iterable[Group], partition: str, timeout_s: float | None
) -> None:
    """Put the rows of groups back, with the tags of their responses. Blocks.

    Raises CheckpointError if shards are damaged or lack rows, WaitTimeout after `timeout_s` seconds.
    """
    tags = {one.key: dict(one.payload) for group in groups for one in group.trajectories}
    units = _units()
    if units:
        known = ray.put(tags)
        asked = [
            unit.restore_rows.remote(str(checkpoint), shards[number :: len(units)], known, partition)
            for number, unit in enumerate(units)
        ]
        what = f"the storage units to restore the rows of {checkpoint}"
        found = {key for keys in got(asked, timeout_s, owner="the start", what=what) for key in keys}
    else:
        found = {*_restored(str(checkpoint), shards, tags, partition)}
    missing = [key for key in tags if key not in found]
    if missing:
        raise CheckpointError(
            f"{checkpoint} lacks the samples of {len(missing)} responses of its state, e.g. {missing[0]}"
        )


def fetch(groups: Iterable[Group], partition: str) -> Rows:
    """Return the rows of groups by key, with the columns as the rollout wrote them."""
    found: Rows = {}
    for wanted, keys in _wanted(groups).items():
        columns = dict(wanted)
        for first in range(0, len(keys), KEYS_A_CALL):
            some = keys[first : first + KEYS_A_CALL]
            data = tq.kv_batch_get(
                keys=some, partition_id=partition, select_fields=sorted({*columns.values()})
            )
            found |= _rows(some, data, columns)
    return found


def put(rows: Mapping[str, Mapping[str, Any]], tags: Mapping[str, Any], partition: str) -> None:
    """Put rows that have tags into the store; both are by key."""
    keys = [key for key in rows if key in tags]
    for first in range(0, len(keys), KEYS_A_CALL):
        some = keys[first : first + KEYS_A_CALL]
        for indices in joinable([rows[key] for key in some]):
            alike = [some[i] for i in indices]
            tq.kv_batch_put(
                keys=alike,
                partition_id=partition,
                fields=SampleColumns([rows[key] for key in alike]),
                tags=[tags[key] for key in alike],
            )


def _units() -> list[Any]:
    """Return the storage units of this run, which TransferQueue names by their number."""
    found: list[Any] = []
    with suppress(ValueError):
        while True:
            found.append(ray.get_actor(f"TransferQueueStorageUnit#{len(found)}"))
    return found


def _wanted(groups: Iterable[Group]) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """Return keys by their columns, each with the name of the column that is read for it.

    `Group.payload` has the names of the columns, for each response or one entry for all. A later step may
    have passed the reward stage already, which rejects tokens in `response_mask`. A resumed run would reject
    from what is left of it, so the mask is taken from `loss_mask`, which only the rollout writes.
    """
    found: defaultdict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for group in groups:
        columns = list(group.payload) * (len(group.trajectories) if len(group.payload) == 1 else 1)
        for one, names in zip(group.trajectories, columns, strict=True):
            as_stored = {MASK: MASK_AS_STORED} if MASK_AS_STORED in names else {}
            found[tuple((name, as_stored.get(name, name)) for name in names)].append(one.key)
    return found


def _indexes_of(keys: Sequence[str], partition: str) -> list[int]:
    """Return the numbers by which storage units know rows. Raises CheckpointError if a key has none."""
    asked = ray.get_actor(*CONTROLLER).indexes_of.remote(list(keys), partition)
    (found,) = got([asked], ASK_S, owner="train", what="the sample store to find its rows")
    known = [index for index in found if index is not None]
    if len(known) != len(keys):
        raise CheckpointError(f"the sample store has {len(known)} of {len(keys)} rows of finished groups")
    return known


def _restored(checkpoint: str, shards: Sequence[str], tags: Mapping[str, Any], partition: str) -> list[str]:
    found: list[str] = []
    for shard in shards:
        rows = tensor_tree.read(store.require_shard(Path(checkpoint), shard))
        for key, columns in rows.items():
            if any(name.startswith(CONDITION) for name in columns):
                columns.setdefault(HOLDER, key)  # earlier versions stored them with each image
        put(rows, tags, partition)
        found += rows
    return found


def _rows(keys: Sequence[str], data: Any, columns: Mapping[str, str]) -> Rows:
    """Return the rows of `data` by key; `columns` maps the name of a column to the one to read it from."""
    values = {
        name: list(data[read].unbind(0) if isinstance(data[read], torch.Tensor) else data[read])
        for name, read in columns.items()
    }
    return {key: {name: values[name][place] for name in columns} for place, key in enumerate(keys)}


def storage_actor(stock: Any) -> Any:
    """Return our storage as an actor class with the options of TransferQueue's."""
    return ray.remote(**stock._default_options)(PipelineSimpleStorageUnit)


def controller_actor(stock: Any) -> Any:
    """Return our controller as an actor class with the options of TransferQueue's."""
    return ray.remote(**stock._default_options)(PipelineTransferQueueController)
