# SPDX-License-Identifier: Apache-2.0
"""What an engine's loader does with a version, written down once and done again without it.

A loader is called for every tensor and finds out each time which rows of which parameter it belongs to; that
takes
longer than the copies. If a load turns out to be nothing but copies from published tensors into parameters,
the list
of them is all that the next versions need. Whatever else a loader does (casts to scales, transposes, sums),
it goes on
being called.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .manifest import Manifest, TensorEntry

_COPY = torch.ops.aten.copy_.default
_CONSTANT = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}
"""What a loader may do besides: the same each time, such as the padding of an embedding."""


class Copy(NamedTuple):
    """A view of a published tensor, copied into a view of a served parameter."""

    name: str
    offset: int
    """In elements, from the start of the published tensor; so are the strides."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: torch.Tensor


class Recorder(TorchDispatchMode):
    """Sees every operation of a load; `copies` is what it consists of, unless there was `other`."""

    def __init__(self, published: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.other: str | None = None
        """An operation that cannot be repeated from a list."""
        self._published = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes, n) for n, t in published.items() if t.nbytes
        )
        self._starts = [start for start, _, _ in self._published]

    def recorded(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> RecordedLoad | None:
        """What was seen, if it can be done again: copies alone, whose result is still what was copied."""
        if self.other is not None or not self.copies:
            return None
        load = RecordedLoad(self.copies, manifest.tensors)
        return load if load.took(manifest, published) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _COPY:
            self._copied(args[0], args[1])
        elif func not in _CONSTANT and (func._schema.is_mutable or not _is_view(result, args)):
            self.other = self.other or str(func)
        return result

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._name_of(source)
        if name is None or self._name_of(target) is not None:
            self.other = self.other or "a copy of something that was not published"
            return
        start = self._published[self._index_of(source)][0]
        offset = (source.data_ptr() - start) // source.element_size()
        # A view would hold on to the tensor that it was made from.
        plain = placed_like(target, target.untyped_storage())
        self.copies.append(Copy(name, offset, tuple(source.shape), source.stride(), plain))

    def _index_of(self, tensor: torch.Tensor) -> int:
        return bisect_right(self._starts, tensor.data_ptr()) - 1

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        index = self._index_of(tensor)
        if index < 0:
            return None
        _, end, name = self._published[index]
        return name if tensor.data_ptr() < end else None


def _is_view(result: Any, args: Sequence[Any]) -> bool:
    """Does it only look at memory that an argument has?"""
    results = result if isinstance(result, (list, tuple)) else [result]
    known = {memory_of(arg) for arg in args if isinstance(arg, torch.Tensor)}
    return all(isinstance(one, torch.Tensor) and memory_of(one) in known for one in results) and bool(results)


def memory_of(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor is in, or is a view of."""
    address: int = tensor.untyped_storage().data_ptr()
    return address


def placed_like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """As `tensor`, but in that memory."""
    placed = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return placed.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class RecordedLoad:
    """The copies of one load, for versions of the same layout."""

    def __init__(self, copies: Sequence[Copy], layout: Sequence[TensorEntry]) -> None:
        self._copies = list(copies)
        self._layout = tuple(layout)
        self.targets = [copy.target for copy in copies]
        """Views of the parameters that are written."""
        self._sources: dict[tuple[str, ...], list[torch.Tensor]] = {}
        """Views of an arena, for each of the two."""

    def fits(self, manifest: Manifest, parameters: Iterable[torch.Tensor]) -> bool:
        """Would the copies of this load bring that version into these parameters?"""
        memory = {memory_of(parameter) for parameter in parameters}
        return manifest.tensors == self._layout and all(
            memory_of(target) in memory for target in self.targets
        )

    def copy(
        self, manifest: Manifest, published: Mapping[str, torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> None:
        """Make the copies, into `targets` in place of those of the recording."""
        sources = self._views(manifest, published)
        on_device = any(target.is_cuda for target in targets)
        torch._foreach_copy_(list(targets), sources, non_blocking=on_device)
        if on_device:
            torch.cuda.current_stream().synchronize()

    def took(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> bool:
        """Do the parameters hold, bit for bit, what was copied into them?"""
        pairs = zip(self.targets, self._views(manifest, published), strict=True)
        return all(torch.equal(target, source.to(target)) for target, source in pairs)

    def _views(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        key = tuple(bucket.segment for bucket in manifest.buckets)
        if key not in self._sources:
            if len(self._sources) == 2:  # an arena was replaced by a larger one
                self._sources.clear()
            self._sources[key] = [
                published[c.name].as_strided(c.shape, c.stride, published[c.name].storage_offset() + c.offset)
                for c in self._copies
            ]
        return self._sources[key]
