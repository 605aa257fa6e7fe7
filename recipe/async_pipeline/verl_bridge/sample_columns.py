# SPDX-License-Identifier: Apache-2.0
"""Columns of a batch in TransferQueue: how answers get in, and what training workers get out.

verl joins answers to a TensorDict, which TransferQueue's own storage, where each row lies by itself, takes
apart again, four
times for each column. That is a third of what an agent loop worker does for short answers. What is stored is
the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

PICTURES = "multi_modal_inputs"


class Rows(torch.Tensor):
    """Tensors of different lengths; a nested tensor for those who ask whether it is one, and then take it
    apart.
    """

    is_nested = True
    _rows: Sequence[torch.Tensor]

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> Rows:
        made: Rows = torch.Tensor._make_subclass(cls, torch.empty(0, 0))
        made._rows = rows
        return made

    def unbind(self, dim: int = 0) -> Sequence[torch.Tensor]:  # type: ignore[override]
        assert dim == 0
        return self._rows


class Columns(dict[str, Any]):
    """A batch as TransferQueue reads it: columns by name, and how many rows they have."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """`rows`: mappings with the same keys; tensors of a column only differ in their first dimension."""
        super().__init__({name: _column([row[name] for row in rows]) for name in rows[0]})
        self.batch_size = (len(rows),)


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if all(value.shape == values[0].shape for value in values):
        return torch.stack(values)
    return Rows.of(values)


def trained_columns(meta: KVBatchMeta, *, pictures: bool) -> list[str]:
    """Columns that a model, or a loss, can compute with: tensors, and what a processor made of pictures.

    verl fetches all. Prompts as text, what an agent loop noted and what a reward function needs then take
    training workers as
    long as a fifth of a short step: to fetch, and to sort and split with the tensors.
    """
    columns = tq.get_client().kv_retrieve_meta(keys=meta.keys, partition_id=meta.partition_id).field_schema
    return [
        name
        for name, about in columns.items()
        if not about["is_non_tensor"] or (pictures and name == PICTURES)
    ]
