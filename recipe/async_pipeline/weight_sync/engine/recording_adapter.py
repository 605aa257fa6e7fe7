# SPDX-License-Identifier: Apache-2.0
"""An engine adapter for engines whose loader is Python code.

The first load of a layout runs the engine's loader and records it. If it consisted of copies, later
versions repeat the copies, into the served tensors or into a standby copy on the device. Either way the
record tells which published element each served element is. An engine that computes its weights from the
published ones can do that ahead instead (`conversion`); its loader then gets the results.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ...errors import ProofError
from ..memory.arena import ArenaReader
from ..memory.manifest import Manifest, TensorEntry
from ..proof.element_map import ElementMap, View
from .copy_plan import RecordedLoad, Recorder, view_of
from .engine_adapter import Computed, Conversion, Delivered, Expected
from .standby import (
    Convert,
    Converted,
    Named,
    StagingEnded,
    StandbyConversion,
    StandbyCopy,
    ignore,
    replaced,
)

TensorPlace = tuple[int, View, torch.dtype]


class RecordingAdapter(ABC):
    """One rank of an engine; see `engine_adapter.EngineAdapter`. Subclasses know the engine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reader = ArenaReader()
        self._recorded: RecordedLoad | None = None
        self._standby: StandbyCopy | StandbyConversion | None = None
        self._elements: ElementMap | None = None
        self._layout: tuple[TensorEntry, ...] = ()
        self._converted: Mapping[str, Conversion] = {}
        self._pinned: dict[tuple[str, ...], object] = {}
        """What each of the two arenas is pinned for: a record, or a layout for the loader."""

    @abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return every served tensor that a load is responsible for; see `Delivered.tensors`."""

    def begin(self) -> None:  # noqa: B027 - most engines require nothing
        """Do what the engine requires before the first piece of each load by its loader."""

    def convert_piece(self, piece: Sequence[Named]) -> Sequence[Named]:
        """Return some published tensors as `load` takes them, with those converted that `conversion` would.

        Unlike `load`, it is not recorded, so it may copy whole tensors to the device.
        """
        return piece

    @abstractmethod
    def load(self, pieces: Iterable[Sequence[Named]]) -> None:
        """Run the engine's loader on a version, whose pieces are converted one by one.

        A loader may keep a tensor until another comes, but only during one call, so give it all at once.
        """

    @abstractmethod
    def finish(self) -> None:
        """Do what the engine requires after the last piece of each load."""

    def expected(self, entry: TensorEntry) -> Expected | None:
        """Return where the engine's own tables place a tensor; see `Delivered.expected`."""
        return None

    def computed(self) -> Sequence[Computed]:
        """Return the served tensors that are not copies of published ones."""
        return ()

    def converted(self) -> Mapping[str, Conversion]:
        """Return how elements of served tensors follow from published ones, by tensor, if not by a cast."""
        return {}

    def conversion(self) -> Convert | None:
        """Return how tensors of the current layout are converted, or None if the engine only copies them.

        `load` must take the results in the place of the published tensors.
        """
        return None

    @abstractmethod
    def seal(self) -> None:
        """Do what the engine does with weights once they are proved."""

    def prepare(self, manifest: Manifest, ended: StagingEnded = ignore) -> bool:
        """Start to stage a version on the device; the thread that does so calls `ended` last.

        Returns False if it cannot be staged because no load of its layout could be recorded. If the staging
        fails, e.g. because device memory runs out, `ended` gets the error and `commit` loads the version from
        host memory.
        """
        try:
            standby = self._standby_for(manifest)
            if standby is None:
                return False
            self._standby = standby
            standby.begin(manifest, self.published(manifest), ended, self._pinning(manifest))
        except Exception as error:  # noqa: BLE001  ranks whose staging begins must not wait for this one
            self._standby = None
            ended(error)
        return True

    def _standby_for(self, manifest: Manifest) -> StandbyCopy | StandbyConversion | None:
        """Return what stages a version, the same object for each version of a layout if possible."""
        served = list(self.tensors().values())
        if self._recorded is not None and self._recorded.fits(manifest, served):
            if isinstance(self._standby, StandbyCopy):
                return self._standby
            # The graphs of an accelerator hold addresses, so memory can be exchanged on CPU only.
            return StandbyCopy(self._recorded, served, may_exchange=self.device.type == "cpu")
        if self._layout != manifest.tensors or (convert := self.conversion()) is None:
            return None
        if isinstance(self._standby, StandbyConversion):
            return self._standby
        return StandbyConversion(convert, self.device)

    def staged_version(self) -> int | None:
        """Return the version that is complete on the device, or None. Raises the error of the copy."""
        return None if self._standby is None else self._standby.version()

    def commit(self, manifest: Manifest, piece_bytes: int) -> Delivered:
        """Load a version by the shortest way; see `EngineAdapter.commit`."""
        tensors = self.tensors()
        standby = self._standby = self._staged(manifest.version)
        if isinstance(standby, StandbyCopy):
            standby.commit()
            self.finish()
        elif self._recorded is not None and self._recorded.fits(manifest, tensors.values()):
            self._keep_pinned(manifest, self._recorded)
            self._recorded.copy(manifest, self.published(manifest), self._recorded.targets)
            self.finish()
        else:
            self._keep_pinned(manifest, manifest.tensors)
            converted = standby.take() if standby is not None else {}
            self.begin()
            tensors = self._load_and_record(manifest, piece_bytes, self.tensors(), converted)
        assert self._elements is not None, "a load that was not recorded has no repetition"
        if self.device.type == "cuda":
            # For the next version in this memory; the engine must not wait for it now.
            threading.Thread(target=self._pinning(manifest), name="pin", daemon=True).start()
        conversions = {**self._converted, **self.converted()}
        return Delivered(tensors, self._elements, self.expected, conversions, self.computed())

    def _staged(self, version: int) -> StandbyCopy | StandbyConversion | None:
        """Return what holds a staged version, or None if that failed: the load from host memory remains."""
        try:
            return self._standby if self.staged_version() == version else None
        except Exception:  # noqa: BLE001  `prepare` has reported it
            return None

    def _pinning(self, manifest: Manifest) -> Callable[[], None]:
        """Return a call that pins what further loads of this layout read of a version's memory."""
        recorded, arena = self._recorded, _arena(manifest)
        by_record = recorded is not None and recorded.layout == manifest.tensors
        reading: object = recorded if by_record else manifest.tensors
        known = by_record or self._layout == manifest.tensors
        if self.device.type != "cuda" or not known or self._pinned.get(arena) == reading:
            return lambda: None
        if len(self._pinned) == 2:  # a larger arena replaced one of the two
            self._pinned.clear()
        self._pinned[arena] = reading
        published = self.published(manifest)
        if by_record:
            assert recorded is not None
            return self._reader.pinning(manifest, recorded.sources(manifest, published))
        # A loader may copy any part of a tensor, and buckets share no page.
        assert self._elements is not None
        names = {*self._elements.pieces, *(name for one in self.computed() for name in one.sources)}
        buckets = {entry.bucket for entry in manifest.tensors if entry.name in names}
        read = [published[entry.name] for entry in manifest.tensors if entry.bucket in buckets]
        return self._reader.pinning(manifest, read)

    def _keep_pinned(self, manifest: Manifest, reading: object) -> None:
        """Unpin a version's memory if it is pinned for another way of reading, whose ranges differ."""
        arena = _arena(manifest)
        if self._pinned.get(arena, reading) != reading:
            del self._pinned[arena]
            self._reader.pinning(manifest, ())()

    def published(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Return the version's tensors, aliases of the arena."""
        return self._reader.tensors(manifest)

    def _load_and_record(
        self,
        manifest: Manifest,
        piece_bytes: int,
        tensors: Mapping[str, torch.Tensor],
        converted: Converted,
    ) -> Mapping[str, torch.Tensor]:
        """Run the loader, learn the map, and return the served tensors."""
        if isinstance(self._standby, StandbyCopy):
            self._standby = None  # it belongs to an older record
        published, before = self.published(manifest), _places(tensors)
        recorder = Recorder(published)
        with recorder:
            self.load(self._pieces(manifest, piece_bytes, converted, recorder))

        learned = recorder.elements(tensors)
        if learned != self._elements or manifest.tensors != self._layout:
            self._elements, self._layout = learned, manifest.tensors
            self._converted = widened(manifest, learned, tensors)

        self.finish()
        served = self.tensors()
        for name, place in _places(served).items():
            if before.get(name) != place:
                raise ProofError(
                    f"v{manifest.version}: {name} has no served tensor to compare; the engine repacked it"
                )
        self._recorded = recorder.recorded(manifest, published)
        return served

    def _pieces(
        self, manifest: Manifest, piece_bytes: int, converted: Converted, recorder: Recorder
    ) -> Iterator[Sequence[Named]]:
        """Yield the pieces of a version, converted, which is not recorded."""
        pieces = self._reader.read(manifest, piece_bytes)
        while True:
            with recorder.paused():
                if (piece := next(pieces, None)) is None:
                    return
                ready = self.convert_piece(replaced(piece, converted))
            yield ready
            del piece, ready  # one piece at a time is in memory


def _arena(manifest: Manifest) -> tuple[str, ...]:
    return tuple(bucket.segment for bucket in manifest.buckets)


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorPlace]:
    return {name: (t.data_ptr(), view_of(t), t.dtype) for name, t in tensors.items()}


def widened(
    manifest: Manifest, elements: ElementMap, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Conversion]:
    """Return the conversions of served tensors whose dtype has every value of the published one.

    Some engines keep a few tensors, such as a router's bias, in a wider dtype than the model's.
    """
    dtypes = {entry.name: getattr(torch, entry.dtype) for entry in manifest.tensors}
    found: dict[str, Conversion] = {}
    for name, pieces in elements.pieces.items():
        for piece in pieces:
            wide = tensors[piece.served].dtype
            if name in dtypes and dtypes[name] != wide and holds(wide, dtypes[name]):
                found[piece.served] = _Cast(wide)
    return found


class _Cast:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._dtype)


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether a floating-point dtype has all values of another."""
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return bool(a.eps <= b.eps and a.max >= b.max and a.smallest_normal <= b.smallest_normal)
