# SPDX-License-Identifier: Apache-2.0
"""Which element of which published tensor each element of a served tensor is.

A map is a list of pieces. A piece says that a strided view of a published tensor is, element by element,
a strided view of a served one: every shard, transpose, part of a fused tensor and slot of an expert is
such a pair. Maps are learned from an engine's load (`copy_plan.Recorder`) and derived a second time,
independently, from what the engine declares (`engine_adapter.Expected`); `proof.py` compares the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Positions = npt.NDArray[np.int64]
HeldElements = npt.NDArray[np.bool_]


class View(NamedTuple):
    """A strided view of a tensor; offset and strides in elements from the tensor's first one."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> View:
        """Return the view of all of a contiguous tensor."""
        return cls(0, tuple(shape), contiguous_strides(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        axes = [(n, s) for n, s in zip(self.shape, self.stride, strict=True) if n != 1]
        return all(s == w for (_, s), w in zip(axes, contiguous_strides([n for n, _ in axes]), strict=True))

    @property
    def one_to_one(self) -> bool:
        """Whether different indices are different elements, so that `find` has one answer."""
        reach = 0
        for size, stride in sorted(self._axes(), key=lambda axis: axis[1]):
            if stride <= reach:
                return False
            reach += (size - 1) * stride
        return True

    def narrow(self, axis: int, start: int, length: int) -> View:
        """Return a part of the view along one axis, as `torch.Tensor.narrow`."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return View(self.offset + start * self.stride[axis], shape, self.stride)

    def select(self, axis: int, index: int) -> View:
        """Return the view without an axis, at one index of it."""
        part = self.narrow(axis, index, 1)
        return View(
            part.offset,
            self.shape[:axis] + self.shape[axis + 1 :],
            self.stride[:axis] + self.stride[axis + 1 :],
        )

    def exchanged(self, one: int = -2, other: int = -1) -> View:
        """Return the view with two axes exchanged, the last two by default."""
        shape, stride = [*self.shape], [*self.stride]
        for axes in (shape, stride):
            axes[one], axes[other] = axes[other], axes[one]
        return View(self.offset, tuple(shape), tuple(stride))

    def split(self, axis: int, sizes: Sequence[int]) -> View:
        """Return the view with one axis as several, of these sizes."""
        steps = [step * self.stride[axis] for step in contiguous_strides(sizes)]
        shape, stride = [*self.shape], [*self.stride]
        shape[axis : axis + 1], stride[axis : axis + 1] = sizes, steps
        return View(self.offset, tuple(shape), tuple(stride))

    def find(self, positions: Positions) -> tuple[HeldElements, list[Positions]]:
        """Return which positions of the tensor are in this view, and the index of each of those.

        The view must be `one_to_one`.
        """
        rest = positions - self.offset
        held = rest >= 0
        index = [np.zeros_like(positions) for _ in self.shape]
        largest_first = sorted(range(len(self.shape)), key=lambda axis: -self.stride[axis])
        for axis in largest_first:
            size, stride = self.shape[axis], self.stride[axis]
            if size == 0:
                held[:] = False
            if size > 1:
                index[axis], rest = np.divmod(rest, stride)
                held &= index[axis] < size
        held &= rest == 0
        return held, [of_axis[held] for of_axis in index]

    def at(self, index: Sequence[Positions]) -> Positions:
        """Return the positions of elements of the view."""
        places = np.full(len(index[0]) if index else 1, self.offset, dtype=np.int64)
        for of_axis, stride in zip(index, self.stride, strict=True):
            places += of_axis * stride
        return places

    def corners(self) -> Positions:
        """Return the positions of all corners; two maps of strided views that agree there are equal."""
        ends = [sorted({0, size - 1}) for size in self.shape]
        if not self.numel:
            return np.empty(0, dtype=np.int64)
        found = [
            self.offset + sum(i * s for i, s in zip(corner, self.stride, strict=True))
            for corner in itertools.product(*ends)
        ]
        return np.array(found, dtype=np.int64)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this view of a tensor."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    def rows(self) -> tuple[int, int, int] | None:
        """Return number, pitch and width of rows, if the view has the elements of equal rows, or None."""
        axes: list[tuple[int, int]] = []
        for size, stride in sorted(self._axes(), key=lambda axis: -axis[1]):
            if axes and axes[-1][1] == size * stride:
                axes[-1] = axes[-1][0] * size, stride
            else:
                axes.append((size, stride))
        if not axes or axes[-1][1] != 1:
            axes.append((1, 1))
        if len(axes) == 1:
            axes.insert(0, (1, axes[0][0]))
        (count, pitch), (width, _) = axes[0], axes[-1]
        return (count, pitch, width) if len(axes) == 2 and width <= pitch else None

    def _axes(self) -> list[tuple[int, int]]:
        return [(n, s) for n, s in zip(self.shape, self.stride, strict=True) if n > 1]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Piece(NamedTuple):
    """A view of a published tensor, and the view of a served tensor that has the same elements."""

    source: View
    served: str
    target: View

    def places(self, positions: Positions) -> tuple[HeldElements, Positions]:
        """Return which positions of the published tensor are here, and their positions in the served one."""
        held, index = self.source.find(positions)
        return held, self.target.at(index) if held.any() else np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class ElementMap:
    """The pieces of one load, by published tensor."""

    pieces: Mapping[str, tuple[Piece, ...]]
    constant: Mapping[str, tuple[View, ...]] = field(default_factory=dict)
    """Views of served tensors that the load fills with a constant, e.g. padding."""
    note: str = field(default="", compare=False)
    """What the load did in addition to copies, for messages: two loads with the same map may differ in it."""

    def targets(self) -> dict[str, list[tuple[str, View]]]:
        """Return the published name and the view of each piece, by served tensor."""
        found: dict[str, list[tuple[str, View]]] = {}
        for name, pieces in self.pieces.items():
            for piece in pieces:
                found.setdefault(piece.served, []).append((name, piece.target))
        return found


def missing_element(views: Iterable[View], tensor: View) -> int | None:
    """Return a position of `tensor` that none of the views has, or None if they cover it."""
    made = list(views)
    if any(view.contiguous and view.offset <= tensor.offset and covers(view, tensor) for view in made):
        return None
    if all(view.contiguous for view in made) and tensor.contiguous:
        return _gap([(view.offset, view.offset + view.numel) for view in made], tensor)
    rows = {view.rows() for view in made if view.numel}
    if len(rows) == 1 and (row := rows.pop()) is not None and tensor == View.whole(tensor.shape):
        count, pitch, width = row
        starts = [view.offset for view in made if view.numel]
        if count * pitch == tensor.numel and max(starts) + width <= pitch:
            # All rows are alike, so the first one tells.
            return _gap([(start, start + width) for start in starts], View.whole((pitch,)))
    found = _marked(made, tensor)
    if bool(found.all()):
        return None
    index = [axis[:1].numpy() for axis in (~found).nonzero(as_tuple=True)]
    return int(tensor.at(index)[0])


def overlap(views: Sequence[View]) -> bool:
    """Return whether an element is in two of the views."""
    made = [view for view in views if view.numel]
    if all(view.contiguous for view in made):
        ends = sorted((view.offset, view.offset + view.numel) for view in made)
        return any(end > start for (_, end), (start, _) in itertools.pairwise(ends))
    return int(_marks(made).sum()) < sum(view.numel for view in made)


def covers(view: View, tensor: View) -> bool:
    """Return whether a contiguous view has all elements of a contiguous tensor."""
    return tensor.contiguous and view.offset + view.numel >= tensor.offset + tensor.numel


def _gap(intervals: list[tuple[int, int]], tensor: View) -> int | None:
    reached = tensor.offset
    for start, end in sorted(intervals):
        if start > reached:
            break
        reached = max(reached, end)
    return None if reached >= tensor.offset + tensor.numel else reached


def _marked(views: Sequence[View], tensor: View) -> torch.Tensor:
    """Return for each element of the tensor whether a view has it."""
    return tensor.of(_marks([*views], last(tensor)))


def _marks(views: Sequence[View], end: int = 0) -> torch.Tensor:
    marks = torch.zeros(max([end, *map(last, views)]), dtype=torch.bool)
    for view in views:
        view.of(marks).fill_(True)
    return marks


def last(view: View) -> int:
    """Return the position after the last element of a view."""
    if not view.numel:
        return view.offset
    return view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True)) + 1
