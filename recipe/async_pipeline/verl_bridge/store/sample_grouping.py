# SPDX-License-Identifier: Apache-2.0
"""Which trajectories can be sent to the sample store in one put."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch


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
