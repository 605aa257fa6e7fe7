# SPDX-License-Identifier: Apache-2.0
"""Find the strided view of a parameter that a mapping makes a tensor from.

A mapping says for each element which place of the parameter it comes from, as two numbers: its row, and its
column among all elements of that row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 22
"""Elements that are compared at once."""


@dataclass(frozen=True)
class ParameterView:
    """A strided view of a parameter: the elements of one block of a tensor, in its order."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    """Index of the first element, in the flat parameter."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of a contiguous parameter."""
        flat = parameter.detach()
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.first)


Cut = tuple[tuple[int, ...], tuple[int, ...], "torch.Tensor | None"]
"""Shape of a tensor, offset of this rank's block, and the block; None if it is not rectangular."""


def cut(tensors: dict[str, torch.Tensor]) -> dict[str, Cut]:
    """Cut the block that is not NaN out of each tensor, as whole numbers; leave out tensors without one."""
    found: dict[str, Cut] = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        here = ~torch.isnan(tensor)
        if not here.any():
            continue
        block = []
        for dim in range(tensor.dim()):
            others = tuple(other for other in range(tensor.dim()) if other != dim)
            inside = (here.any(dim=others) if others else here).nonzero()[:, 0]
            block.append(slice(int(inside[0]), int(inside[-1]) + 1))
        values, whole = tensor[tuple(block)], bool(here[tuple(block)].all())
        numbers = values.to(torch.int32)
        # A mapping that blends elements gives fractions.
        exact = whole and bool((numbers == values).all())
        found[name] = shape, tuple(one.start for one in block), numbers if exact else None
    return found


def fitted(row: torch.Tensor, column: torch.Tensor, columns: int) -> ParameterView | None:
    """Return the strided view of the parameter whose elements are at (row, column), or None if no view is.

    A dimension with two strides, such as the rows of a query that is interleaved with keys and values,
    becomes two.
    """
    size: list[int] = []
    stride: list[int] = []
    for dim, length in enumerate(row.shape):
        line = [0] * row.dim()
        index: list[Any] = [*line]
        index[dim] = slice(None)
        along = row[tuple(index)].long() * columns + column[tuple(index)]
        period = period_of(along)
        if length % period:
            return None
        if period < length:
            size.append(length // period)
            stride.append(int(along[period] - along[0]))
        size.append(period)
        stride.append(int(along[1] - along[0]) if period > 1 else 0)
    first = int(row.flatten()[0]) * columns + int(column.flatten()[0])
    view = ParameterView(tuple(size), tuple(stride), first)
    return view if explains(view, row, column, columns) else None


def period_of(line: torch.Tensor) -> int:
    """Return how many elements from the first on are equally far apart."""
    steps = line.diff()
    other = (steps != steps[0]).nonzero() if len(steps) else steps
    return int(other[0]) + 1 if len(other) else len(line)


def explains(view: ParameterView, row: torch.Tensor, column: torch.Tensor, columns: int) -> bool:
    """Return whether each element of the view is the one that (row, column) names."""
    row, column = row.reshape(view.size), column.reshape(view.size)
    inner = torch.tensor(0)
    for length, stride in zip(view.size[1:], view.stride[1:], strict=True):
        inner = inner[..., None] + torch.arange(length) * stride
    chunk = max(1, CHUNK_ELEMENTS // max(1, inner.numel()))
    for start in range(0, view.size[0], chunk):
        outer = torch.arange(start, min(start + chunk, view.size[0])) * view.stride[0] + view.first
        expected = outer.view(-1, *[1] * inner.dim()) + inner
        part = slice(start, start + chunk)
        if not torch.equal(expected, row[part].long() * columns + column[part]):
            return False
    return True
