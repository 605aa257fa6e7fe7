# SPDX-License-Identifier: Apache-2.0
"""Follows published elements through a loader's intermediate tensors.

Some loaders do not copy views of published tensors into the served ones, but first concatenate, cast,
transpose or select them. Next to each such intermediate tensor stands one of integers that says which
published element each of its elements is. When the intermediate one is copied into a served tensor, the
integers are divided into blocks that are strided views of one published tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .element_map import Positions, View

REARRANGING = {
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.index_select.default,
    torch.ops.aten.index.Tensor,
}
"""Operations whose results hold elements of their arguments, cast at most."""
_CASTS = ("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format")
MOST_BLOCKS = 4096
"""Of one copy. More of them is no arrangement that a map could describe."""


class StridedBlock(NamedTuple):
    """A part of an intermediate tensor whose elements are a strided view of one published tensor."""

    name: str
    source: View
    start: tuple[int, ...]
    """Index of the part's first element in the intermediate tensor."""


class Provenance:
    """The intermediate tensors of one load."""

    def __init__(self, published: Mapping[str, torch.Tensor]) -> None:
        self._names = [name for name, tensor in published.items() if tensor.numel()]
        self._bases: list[int] = []
        """The number of each tensor's first element; there is a gap after each tensor."""
        base = 0
        for name in self._names:
            self._bases.append(base)
            base += published[name].numel() + 1
        self._base_of = dict(zip(self._names, self._bases, strict=True))
        self._numbers: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        """By address of the storage, which is kept as long as the loader uses it."""

    def follow(
        self, func: Any, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find: Any
    ) -> bool:
        """Follow one operation; return whether its result consists of published elements.

        `find` returns name and view of a tensor that is a view of a published one, or None.
        """
        if func not in REARRANGING or not isinstance(result, torch.Tensor):
            return False
        numbers = [self._numbered(arg, find) if position == 0 else arg for position, arg in enumerate(args)]
        if numbers[0] is None:
            return False
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            found = numbers[0]
        else:
            found = func(*numbers, **{name: value for name, value in kwargs.items() if name not in _CASTS})

        storage = result.untyped_storage()
        flat = torch.full((storage.nbytes() // result.element_size(),), -1, dtype=torch.int64)
        flat.as_strided(result.shape, result.stride(), result.storage_offset()).copy_(found)
        self._forget_unused()
        self._numbers[storage.data_ptr()] = storage, flat
        return True

    def blocks(self, tensor: torch.Tensor) -> list[StridedBlock] | None:
        """Return what an intermediate tensor consists of, or None if it is no such tensor."""
        found = self._numbered(tensor, lambda one: None)
        if found is None:
            return None
        try:
            return list(self._divided(found.numpy(), (0,) * found.dim(), [MOST_BLOCKS]))
        except _TooMany:
            return None

    def _numbered(self, arg: Any, find: Any) -> Any:
        """Return the numbers of the elements of a tensor, or of each of a list, or None if it has others."""
        if isinstance(arg, (list, tuple)):
            parts = [self._numbered(one, find) for one in arg]
            return None if any(part is None for part in parts) else parts
        if not isinstance(arg, torch.Tensor):
            return None
        known = self._numbers.get(arg.untyped_storage().data_ptr())
        if known is not None:
            return known[1].as_strided(arg.shape, arg.stride(), arg.storage_offset())
        found = find(arg)
        if found is None:
            return None
        name, view = found
        numbers = torch.full(view.shape, self._base_of[name] + view.offset, dtype=torch.int64)
        for axis, (size, stride) in enumerate(zip(view.shape, view.stride, strict=True)):
            behind = [1] * (len(view.shape) - axis - 1)
            numbers += (torch.arange(size) * stride).view(size, *behind)
        return numbers

    def _forget_unused(self) -> None:
        for address, (storage, _) in list(self._numbers.items()):
            # One reference is in the table, the other is `storage`.
            if torch._C._storage_Use_Count(storage._cdata) <= 1:
                del self._numbers[address]

    def _divided(self, numbers: Positions, start: tuple[int, ...], left: list[int]) -> Iterator[StridedBlock]:
        """Divide into blocks: arithmetic along each axis, and inside one tensor."""
        if not numbers.size:
            return
        left[0] -= 1
        if left[0] < 0:
            raise _TooMany
        first = int(numbers.flat[0])
        axis, at = self._break(numbers)
        if axis is None:
            index = bisect_right(self._bases, first) - 1
            stride = tuple(
                int(numbers.take(1, axis=a).flat[0]) - first if size > 1 else 1
                for a, size in enumerate(numbers.shape)
            )
            yield StridedBlock(
                self._names[index], View(first - self._bases[index], numbers.shape, stride), start
            )
            return
        for part, offset in zip(np.split(numbers, [at], axis=axis), (0, at), strict=True):
            moved = (*start[:axis], start[axis] + offset, *start[axis + 1 :])
            yield from self._divided(part, moved, left)

    def _break(self, numbers: Positions) -> tuple[int | None, int]:
        """Return an axis and an index along it where a block ends, or None if it is one block."""
        if (numbers < 0).any():
            raise _TooMany
        first, predicted = int(numbers.flat[0]), np.zeros_like(numbers)
        for axis, size in enumerate(numbers.shape):
            line = numbers[tuple(slice(None) if a == axis else 0 for a in range(numbers.ndim))]
            steps = np.diff(line)
            tensors = np.searchsorted(self._bases, line, side="right")
            breaks = (steps != steps[:1]) | (steps <= 0) | (tensors[1:] != tensors[0])
            if breaks.any():
                return axis, int(breaks.argmax()) + 1
            behind = [1] * (numbers.ndim - axis - 1)
            predicted = predicted + (line - first).reshape(size, *behind)
        if np.array_equal(predicted + first, numbers):
            return None, 0
        longest = int(np.argmax(numbers.shape))
        return longest, numbers.shape[longest] // 2


class _TooMany(Exception):
    pass
