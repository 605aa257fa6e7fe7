# SPDX-License-Identifier: Apache-2.0
"""Columns of a batch in TransferQueue: how responses are stored, and which columns training fetches.

verl joins responses into a TensorDict, but TransferQueue stores rows separately and splits the TensorDict
four times per column. This takes a third of an agent loop worker's time when responses are short.
`SampleColumns` avoids the round trip; the stored contents are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from ..rollout.diffusers.fields import CONDITION, HOLDER

PARTITION = "train"
"""Partition of the sample store for training samples."""
PICTURES = "multi_modal_inputs"
"""The column with a processor's output for images."""
TEACHER_IDS, TEACHER_LOG_PROBS = "teacher_ids", "teacher_logprobs"
"""Columns in verl's layout, (tokens of prompt and response, K): the K likeliest tokens of the teacher, or the
response's own with K = 1, and their log-probs.
"""


class RaggedRows(torch.Tensor):
    """Tensors of different lengths that present themselves as one nested tensor.

    TransferQueue checks `is_nested` and then calls `unbind`.
    """

    is_nested = True
    _rows: Sequence[torch.Tensor]

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> RaggedRows:
        """Wrap `rows` without copying."""
        made: RaggedRows = torch.Tensor._make_subclass(cls, torch.empty(0, 0))
        made._rows = rows
        return made

    def unbind(self, dim: int = 0) -> Sequence[torch.Tensor]:  # type: ignore[override]
        """Return the rows."""
        assert dim == 0
        return self._rows


class SampleColumns(dict[str, Any]):
    """A batch in the form that TransferQueue reads: columns by name, and the number of rows."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Create columns from `rows`: mappings with equal keys, whose tensors differ in dimension 0 only."""
        super().__init__({name: _column([row[name] for row in rows]) for name in rows[0]})
        self.batch_size = (len(rows),)


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if all(value.shape == values[0].shape for value in values):
        return torch.stack(values)
    return RaggedRows.of(values)


def trained_columns(meta: KVBatchMeta, *, pictures: bool) -> list[str]:
    """Return the columns that a model or a loss can use: tensors, and a processor's output for images.

    Conditions of images are fetched once a prompt; see `workers.diffusion.diffusion_engine`.

    verl fetches all columns. Fetching, sorting and splitting prompt texts, agent loop metadata and inputs of
    reward functions takes the training workers up to a fifth of a short step.
    """
    columns = tq.get_client().kv_retrieve_meta(keys=meta.keys, partition_id=meta.partition_id).field_schema
    return [
        name
        for name, about in columns.items()
        if (not about["is_non_tensor"] and not name.startswith(CONDITION))
        or name == HOLDER
        or (pictures and name == PICTURES)
    ]


def joinable(trajectories: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return indices of trajectories, grouped so that verl joins each group into one TensorDict without loss.

    verl uses the fields of the first trajectory for all and does not pad: tensors may differ in dimension
    0 only. Position ids of images, of shape (4, length), therefore only join with others of equal length.
    """
    alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, fields in enumerate(trajectories):
        alike[tuple(sorted((name, _kind(value)) for name, value in fields.items()))].append(index)
    return list(alike.values())


def _kind(value: Any) -> tuple[Any, ...]:
    return (str(value.dtype), value.dim(), *value.shape[1:]) if isinstance(value, torch.Tensor) else ()
