# SPDX-License-Identifier: Apache-2.0
"""Record the copies of an engine's loader once, then repeat them without the loader.

A loader is called for every tensor and works out each time which rows of which parameter it fills; that
takes longer than the copies. If a load turns out to consist of copies from published tensors into
parameters only, the list of copies is enough for later versions. If it does more (casts to scales,
transposes, sums), the loader continues to be called.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...errors import WeightSyncError
from ..memory.manifest import Manifest, TensorEntry
from ..memory.memory_work import apart, copy_all, copy_in_background
from ..proof.element_map import ElementMap, Piece, View, last
from ..proof.provenance import Provenance, StridedBlock

_COPY = torch.ops.aten.copy_.default
_READ = torch.ops.aten._local_scalar_dense.default
_ZERO = torch.ops.aten.zero_.default
_CONSTANT = {torch.ops.aten.fill_.Scalar, _ZERO}
"""Operations that a loader may add because their result never changes, e.g. an embedding's padding."""


class Copy(NamedTuple):
    """A copy from a view of a published tensor into a view of a served parameter."""

    name: str
    offset: int
    """Elements from the start of the published tensor; the strides are in elements too."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: torch.Tensor


class Filled(NamedTuple):
    """Memory that a load filled with a constant; the strides are in elements."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Recorder(TorchDispatchMode):
    """Records every operation of a load: its `copies`, and the first `other` operation if there is one."""

    def __init__(self, published: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.filled: list[Filled] = []
        self.other: str | None = None
        """An operation that cannot be repeated from a list."""
        self._paused = False
        self._published = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes, n) for n, t in published.items() if t.nbytes
        )
        self._starts = [start for start, _, _ in self._published]
        self._provenance = Provenance(published)
        self._cleared: list[tuple[int, int]] = []
        """Start and end of published memory that the loader wanted to be zero."""
        self._composed: list[tuple[StridedBlock, int, int, tuple[int, ...]]] = []
        """Copies of intermediate tensors: a block, and address, element size and stride of its target."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing of what makes the tensors that the loader gets."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def recorded(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> RecordedLoad | None:
        """Return the load for later reuse, or None if it was more than copies or its result was changed."""
        if self.other is not None or not self.copies:
            return None
        load = RecordedLoad(self.copies, manifest.tensors)
        return load if load.took(manifest, published) else None

    def elements(self, served: Mapping[str, torch.Tensor]) -> ElementMap:
        """Return which published element each served element is, as the recorded copies tell.

        Call it before anything can move the served tensors. Copies into other memory are no pieces.
        """
        places = ServedMemory(served)
        pieces: dict[str, dict[Piece, None]] = {}
        for copy in self.copies:
            place = places.find(copy.target.data_ptr(), tuple(copy.shape), copy.target.stride())
            if place is not None:
                source = View(copy.offset, copy.shape, copy.stride)
                pieces.setdefault(copy.name, {})[Piece(source, *place)] = None
        for block, address, itemsize, stride in self._composed:
            begin = address + itemsize * sum(i * s for i, s in zip(block.start, stride, strict=True))
            place = places.find(begin, block.source.shape, stride)
            if place is not None:
                pieces.setdefault(block.name, {})[Piece(block.source, *place)] = None
        constant: dict[str, dict[View, None]] = {}
        for filled in self.filled:
            place = places.find(*filled)
            if place is not None:
                constant.setdefault(place[0], {})[place[1]] = None
        return ElementMap(
            {name: tuple(found) for name, found in pieces.items()},
            {name: tuple(found) for name, found in constant.items()},
            "" if self.other is None else f"the loader also ran {self.other}",
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable and self._is_published(args[0]):
            return self._clear(func, args[0])
        if func is _COPY and self._is_cleared(args[1]):
            func, args = _ZERO, args[:1]
        result = func(*args, **(kwargs or {}))
        if func is _COPY:
            self._copied(args[0], args[1])
        elif func in _CONSTANT:
            self.filled.append(Filled(args[0].data_ptr(), tuple(args[0].shape), args[0].stride()))
        elif func is _READ and self._is_own(args[0]):
            pass  # e.g. which experts this rank has; no version changes it
        elif not any(isinstance(one, torch.Tensor) for one in tree_leaves((args, kwargs, result))):
            pass  # e.g. a finalizer that the garbage collector calls
        elif func._schema.is_mutable or not _is_view(result, args):
            self._provenance.follow(func, result, args, kwargs or {}, self._view_of)
            self.other = self.other or str(func)
        return result

    def _is_published(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and self._name_of(tensor) is not None

    def _clear(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Remember what a loader clears, and leave it as it is: other replicas read the same memory.

        Raises WeightSyncError if the loader changes a published tensor in another way.
        """
        if func is not _ZERO or not tensor.is_contiguous():
            raise WeightSyncError(
                f"the engine's loader changes {self._name_of(tensor)} in place ({func}), but other replicas "
                "load the same memory; this model cannot be updated"
            )
        self._cleared.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def _is_cleared(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self._cleared)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._name_of(source)
        if name is None:
            self.other = self.other or "a copy of something that was not published"
            self._compose(target, source)
            return
        if source.shape != target.shape:
            source = source.expand(target.shape)
        start = self._published[self._index_of(source)][0]
        offset = (source.data_ptr() - start) // source.element_size()
        # A view would keep the tensor alive that it was made from.
        plain = placed_like(target, target.untyped_storage())
        self.copies.append(Copy(name, offset, tuple(source.shape), source.stride(), plain))

    def _compose(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Remember a copy of an intermediate tensor."""
        for block in self._provenance.blocks(source.expand(target.shape)) or ():
            place = target.data_ptr(), target.element_size(), target.stride()
            self._composed.append((block, *place))

    def _view_of(self, tensor: torch.Tensor) -> tuple[str, View] | None:
        name = self._name_of(tensor)
        if name is None:
            return None
        start = self._published[self._index_of(tensor)][0]
        offset = (tensor.data_ptr() - start) // tensor.element_size()
        return name, View(offset, tuple(tensor.shape), tensor.stride())

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor holds the engine's own state: nothing published was copied into it."""
        return self._name_of(tensor) is None and all(
            memory_of(copy.target) != memory_of(tensor) for copy in self.copies
        )

    def _index_of(self, tensor: torch.Tensor) -> int:
        return bisect_right(self._starts, tensor.data_ptr()) - 1

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        index = self._index_of(tensor)
        if index < 0:
            return None
        _, end, name = self._published[index]
        return name if tensor.data_ptr() < end else None


class ServedMemory:
    """Finds the served tensor at an address. Of several names for the same memory the first one counts."""

    def __init__(self, served: Mapping[str, torch.Tensor]) -> None:
        known: dict[int, tuple[int, str]] = {}
        for name, tensor in served.items():
            if tensor.numel():
                known.setdefault(tensor.data_ptr(), (_end_of(tensor), name))
        self._starts = sorted(known)
        self._ends = [known[start][0] for start in self._starts]
        self._names = [known[start][1] for start in self._starts]
        self._itemsize = {name: served[name].element_size() for name in self._names}

    def find(self, address: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[str, View] | None:
        """Return the served tensor at an address and the view of it, or None if it is other memory."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._ends[index]:
            return None
        name = self._names[index]
        return name, View((address - self._starts[index]) // self._itemsize[name], shape, stride)

    def canonical(self, tensor: torch.Tensor) -> str | None:
        """Return the first name of the served tensor that starts where this one does."""
        index = bisect_right(self._starts, tensor.data_ptr()) - 1
        same = index >= 0 and self._starts[index] == tensor.data_ptr() and tensor.numel()
        return self._names[index] if same else None


def _end_of(tensor: torch.Tensor) -> int:
    return int(tensor.data_ptr() + last(view_of(tensor)) * tensor.element_size())


def view_of(tensor: torch.Tensor) -> View:
    """Return the view of itself that a tensor is."""
    return View(0, tuple(tensor.shape), tensor.stride())


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
        self.layout = tuple(layout)
        self.targets = [copy.target for copy in copies]
        """Views of the parameters that the load writes."""
        self._apart = apart(self.targets)
        """Whether the copies can be made in any order."""
        self._sources: dict[tuple[str, ...], list[torch.Tensor]] = {}
        """Views of an arena, for each of the two arenas."""

    def fits(self, manifest: Manifest, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether the copies of this load would bring that version into these parameters."""
        memory = {memory_of(parameter) for parameter in parameters}
        return manifest.tensors == self.layout and all(memory_of(target) in memory for target in self.targets)

    def copy(
        self,
        manifest: Manifest,
        published: Mapping[str, torch.Tensor],
        targets: Sequence[torch.Tensor],
        *,
        background: bool = False,
    ) -> None:
        """Copy into `targets` instead of the recorded ones.

        With `background`, the calling thread copies alone and gives way to others.
        """
        sources = self.sources(manifest, published)
        device = next((target.device for target in targets if target.is_cuda), None)
        if device is not None:
            torch._foreach_copy_(list(targets), sources, non_blocking=True)
            torch.cuda.current_stream(device).synchronize()
        elif self._apart:
            (copy_in_background if background else copy_all)(targets, sources)
        else:
            torch._foreach_copy_(list(targets), sources)

    def took(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the parameters hold, bit for bit, the values that were copied into them."""
        pairs = zip(self.targets, self.sources(manifest, published), strict=True)
        return all(torch.equal(target, source.to(target)) for target, source in pairs)

    def sources(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the view of the published tensors that each copy reads."""
        key = tuple(bucket.segment for bucket in manifest.buckets)
        if key not in self._sources:
            if len(self._sources) == 2:  # a larger arena replaced one of the two
                self._sources.clear()
            self._sources[key] = [
                published[c.name].as_strided(c.shape, c.stride, published[c.name].storage_offset() + c.offset)
                for c in self._copies
            ]
        return self._sources[key]
