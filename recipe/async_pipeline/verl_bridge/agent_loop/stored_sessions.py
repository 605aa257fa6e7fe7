# SPDX-License-Identifier: Apache-2.0
"""Who stores the trajectories of a session that verl's agent loop worker has processed.

verl's method ends by putting them into TransferQueue, one put for each session. The names that it calls for
that are replaced in its module (`replaced.py`), for the sessions of `stored_by` only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transfer_queue
from verl.utils import tensordict_utils

from ...checkpoint.tensor_tree import storable
from ..store.sample_columns import SampleColumns, joinable
from .episodes.episode import Store, current_episode, episode_with
from .responses import ResponseSample

logger = logging.getLogger(__name__)
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


_told: set[str] = set()
"""Names of values that this process stores as text, which it has logged."""


def storable_rows(rows: FieldRows) -> FieldRows:
    """Return rows whose values a checkpoint can hold: other objects are stored as their text from the start,
    so that a resumed run sees the same. Logs each name once.
    """

    def tell(keys: str, kind: type) -> None:
        if keys not in _told:
            _told.add(keys)
            logger.warning(
                "%s is a %s.%s, which a checkpoint cannot hold: its text is stored; return numbers, text, "
                "lists or dicts",
                keys,
                kind.__module__,
                kind.__qualname__,
            )

    return [storable(row, tell) for row in rows]


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
