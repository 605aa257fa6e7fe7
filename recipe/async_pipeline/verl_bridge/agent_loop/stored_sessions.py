# SPDX-License-Identifier: Apache-2.0
"""Who stores the trajectories of a session that verl's agent loop worker has processed.

verl's method ends by putting them into TransferQueue, one put for each session. The names that it calls for
that are replaced in its module (`replaced.py`), for the sessions of `stored_by` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transfer_queue
from verl.utils import tensordict_utils

from ..sample_columns import SampleColumns
from ..sample_grouping import joinable
from .answers import ResponseSample
from .episode import Store, current_episode, episode_with

FieldRows = list[dict[str, Any]]


@contextmanager
def stored_by(store: Store) -> Iterator[None]:
    """Within, in this task, verl hands the trajectories of a session to `store`."""
    with episode_with(store=store):
        yield


async def put(keys: list[str], fields: FieldRows, tags: list[dict[str, Any]], partition_id: str) -> None:
    """Put trajectories into TransferQueue, as verl does."""
    columns = tensordict_utils.list_of_dict_to_tensordict(fields)
    await transfer_queue.async_kv_batch_put(keys=keys, fields=columns, tags=tags, partition_id=partition_id)


async def put_group(samples: Sequence[ResponseSample], *, as_rows: bool) -> None:
    """Put the responses of a group into TransferQueue. `as_rows`: its backend takes rows without a copy."""
    for indices in joinable([one.fields for one in samples]):
        some = [samples[i] for i in indices]
        keys, fields = [one.trajectory.key for one in some], [one.fields for one in some]
        tags = [one.trajectory.payload for one in some]
        if as_rows:
            await transfer_queue.async_kv_batch_put(
                keys=keys, fields=SampleColumns(fields), tags=tags, partition_id=some[0].partition_id
            )
        else:
            await put(keys, fields, tags, some[0].partition_id)


class SessionStore:
    """TransferQueue, except that a session may be stored by another."""

    def __getattr__(self, name: str) -> Any:
        return getattr(transfer_queue, name)

    async def async_kv_batch_put(self, *, keys: Any, fields: Any, tags: Any, partition_id: str) -> None:
        """Store a session. `fields` are rows if another stores it, else columns; see `columns_of`."""
        store = current_episode().store
        if store is not None:
            await store(keys, fields, tags, partition_id)
        else:
            await transfer_queue.async_kv_batch_put(
                keys=keys, fields=fields, tags=tags, partition_id=partition_id
            )


STORE = SessionStore()


def columns_of(rows: FieldRows) -> Any:
    """Return the rows if another stores them, else verl's columns."""
    return rows if current_episode().store is not None else tensordict_utils.list_of_dict_to_tensordict(rows)
