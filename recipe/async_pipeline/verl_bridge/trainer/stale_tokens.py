# SPDX-License-Identifier: Apache-2.0
"""Mask the tokens of a batch that are too old for its step, in the sample store.

The message queue decides which tokens these are (`core.token_ages`). Only `response_mask` changes, which all
stages of verl read; `loss_mask` stays as the rollout wrote it, and a checkpoint takes the mask from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import transfer_queue as tq
from tensordict import TensorDict

from ...core.items import Group
from ...core.token_ages import masked

COLUMN = "response_mask"


def mask_stale_tokens(groups: Iterable[Group], partition: str) -> None:
    """Set the mask of tokens that are too old to 0. Blocks. Idempotent."""
    for group in groups:
        ranges = {one.key: found for one in group.trajectories if (found := masked(one))}
        if ranges:
            _mask(ranges, partition)


def _mask(ranges: Mapping[str, Sequence[tuple[int, int]]], partition: str) -> None:
    keys = list(ranges)
    stored = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=[COLUMN])
    masks = [mask.clone() for mask in stored[COLUMN].unbind(0)]
    for mask, too_old in zip(masks, ranges.values(), strict=True):
        for start, end in too_old:
            mask[start:end] = 0
    column = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    tq.kv_batch_put(
        keys=keys, partition_id=partition, fields=TensorDict({COLUMN: column}, batch_size=len(keys))
    )
