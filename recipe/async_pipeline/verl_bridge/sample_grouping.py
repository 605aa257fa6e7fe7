# SPDX-License-Identifier: Apache-2.0
"""Which trajectories can go to the sample store in one put."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def joinable(trajectories: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Indices of trajectories that verl joins to one TensorDict without loss, in the order given.

    It takes the first one's fields for all, and pads nothing: tensors may only differ in their first
    dimension. Positions of a picture, (4, length), therefore only go with those of the same length.
    """
    alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, fields in enumerate(trajectories):
        alike[tuple(sorted((name, _kind(value)) for name, value in fields.items()))].append(index)
    return list(alike.values())


def _kind(value: Any) -> tuple[Any, ...]:
    return (str(value.dtype), value.dim(), *value.shape[1:]) if isinstance(value, torch.Tensor) else ()
