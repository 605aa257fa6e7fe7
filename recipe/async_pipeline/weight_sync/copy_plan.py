# SPDX-License-Identifier: Apache-2.0
"""Record the copies of an engine's loader once, then repeat them without the loader.

A loader is called for every tensor and works out each time which rows of which parameter it fills; that
takes longer than the copies. If a load turns out to consist of copies from published tensors into
parameters only, the list of copies is enough for later versions. If it does more (casts to scales,
transposes, sums), the loader continues to be called.
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
"""Operations that a loader may add because their result never changes, e.g. an embedding's padding."""


class Copy(NamedTuple):
    """A copy from a view of a published tensor into a view of a served parameter."""

    name: str
    offset: int
    """Elements from the start of the published tensor; the strides are in elements too."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: torch.Tensor


class Recorder(TorchDispatchMode):
    """Records every operation of a load: its `copies`, and the first `other` operation if there is one."""

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
        """Return the load for later reuse, or None if it was more than copies or its result was changed."""
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
        # A view would keep the tensor alive that it was made from.
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
    """Return whether the results only alias memory of an argument."""
    results = result if isinstance(result, (list, tuple)) else [result]
    known = {memory_of(arg) for arg in args if isinstance(arg, torch.Tensor)}
    return all(isinstance(one, torch.Tensor) and memory_of(one) in known for one in results) and bool(results)


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage that a tensor uses."""
    address: int = tensor.untyped_storage().data_ptr()
    return address


def placed_like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor with the same layout in another storage."""
    placed = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return placed.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class RecordedLoad:
    """The copies of one load, for versions of the same layout."""

    def __init__(self, copies: Sequence[Copy], layout: Sequence[TensorEntry]) -> None:
        self._copies = list(copies)
        self._layout = tuple(layout)
        self.targets = [copy.target for copy in copies]
        """Views of the parameters that the load writes."""
        self._sources: dict[tuple[str, ...], list[torch.Tensor]] = {}
        """Views of an arena, for each of the two arenas."""

    def fits(self, manifest: Manifest, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether the copies of this load would bring that version into these parameters."""
        memory = {memory_of(parameter) for parameter in parameters}
        return manifest.tensors == self._layout and all(
            memory_of(target) in memory for target in self.targets
        )

    def copy(
        self, manifest: Manifest, published: Mapping[str, torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> None:
        """Copy into `targets` instead of the recorded ones."""
        sources = self._views(manifest, published)
        on_device = any(target.is_cuda for target in targets)
        torch._foreach_copy_(list(targets), sources, non_blocking=on_device)
        if on_device:
            torch.cuda.current_stream().synchronize()

    def took(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the parameters hold, bit for bit, the values that were copied into them."""
        pairs = zip(self.targets, self._views(manifest, published), strict=True)
        return all(torch.equal(target, source.to(target)) for target, source in pairs)

    def _views(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        key = tuple(bucket.segment for bucket in manifest.buckets)
        if key not in self._sources:
            if len(self._sources) == 2:  # a larger arena replaced one of the two
                self._sources.clear()
            self._sources[key] = [
                published[c.name].as_strided(c.shape, c.stride, published[c.name].storage_offset() + c.offset)
                for c in self._copies
            ]
        return self._sources[key]
