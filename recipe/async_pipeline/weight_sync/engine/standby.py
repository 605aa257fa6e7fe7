# SPDX-License-Identifier: Apache-2.0
"""A version that a thread stages on the engine's device while the engine generates, copied or converted."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...errors import WeightSyncError
from ..memory.manifest import Manifest
from .copy_plan import RecordedLoad, memory_of, placed_like

STAGING_S = 600.0
"""Deadline for the staging of a version, which takes seconds during generation."""

StagingEnded = Callable[[BaseException | None], None]
"""Gets the error of a staging, or None."""


def ignore(error: BaseException | None) -> None:
    """Do nothing: `StandbyVersion.version` returns the version or raises the error as well."""


class StandbyVersion(ABC):
    """The newest version that is to be served next; subclasses know what is staged of it."""

    def __init__(self) -> None:
        self._wanted: int | None = None
        """The version that `begin` was last called with, until it is served."""
        self._ended: dict[int, BaseException | None] = {}
        """The error of that version's staging, or None, once it has ended."""
        self._thread: threading.Thread | None = None

    @abstractmethod
    def stage(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> None:
        """Stage a version, in a thread."""

    @abstractmethod
    def discard(self) -> None:
        """Free the memory of what is staged."""

    def begin(
        self,
        manifest: Manifest,
        published: Mapping[str, torch.Tensor],
        ended: StagingEnded = ignore,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Stage a version in a thread, which calls `first` and, last, `ended`.

        The thread first waits for that of an older version, whose result is void. If the arena is written
        before `version` returns this version, the result must not be served.
        """
        self._wanted = manifest.version
        self._thread = threading.Thread(
            target=self._run,
            args=(self._thread, manifest, published, ended, first),
            name=f"standby of v{manifest.version}",
            daemon=True,
        )
        self._thread.start()

    def version(self) -> int | None:
        """Return the complete version that is not served yet, or None. Raises the error of the staging."""
        wanted = self._wanted
        if wanted is None or wanted not in self._ended:
            return None
        error = self._ended[wanted]
        if error is not None:
            raise error
        return wanted

    def join(self) -> None:
        """Wait for the staging. Raises WeightSyncError if it does not end in time."""
        if self._thread is not None:
            self._thread.join(STAGING_S)
            if self._thread.is_alive():
                raise WeightSyncError(
                    f"{self._thread.name} did not end within {STAGING_S:g} s; the engine must restart"
                )

    def served(self) -> None:
        """The version is served now."""
        self._wanted = None

    def _run(
        self,
        older: threading.Thread | None,
        manifest: Manifest,
        published: Mapping[str, torch.Tensor],
        ended: StagingEnded,
        first: Callable[[], None],
    ) -> None:
        if older is not None:
            older.join()
        failed: BaseException | None = None
        try:
            first()
            self.stage(manifest, published)
        except BaseException as error:  # noqa: BLE001  the next call for the version raises it
            # The frames of the traceback hold device memory, which the engine may need.
            failed = error.with_traceback(None)
            failed.__context__ = None
            self.discard()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        self._ended = {manifest.version: failed}
        ended(failed)


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a separate stream of a CUDA device, which does not wait for the engine."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


class StandbyCopy(StandbyVersion):
    """A second copy of all memory that a recorded load writes.

    It has the engine's layout, so serving it takes a copy within the device. If only the parameters refer to
    their memory, the two memories are exchanged instead. The copy needs as much memory as the weights.
    """

    def __init__(self, load: RecordedLoad, parameters: Iterable[torch.Tensor], *, may_exchange: bool) -> None:
        """`may_exchange` is False if addresses were recorded, as in the graphs of an accelerator."""
        super().__init__()
        self._load, self._may_exchange = load, may_exchange
        self._owners: dict[int, list[torch.Tensor]] = defaultdict(list)
        for parameter in {id(p): p for p in parameters}.values():
            self._owners[memory_of(parameter)].append(parameter)
        self._targets: list[torch.Tensor] = []

    def commit(self) -> None:
        """Serve the copy. The engine must not run meanwhile."""
        served, standby = self._load.targets, self._targets
        by_memory: dict[int, list[int]] = defaultdict(list)
        for index, target in enumerate(served):
            by_memory[memory_of(target)].append(index)

        # Exchange memory if only the parameters use it; otherwise copy into it.
        in_place: list[int] = []
        for address, indices in by_memory.items():
            owners = self._owners[address]
            if not self._may_exchange or _references(served[indices[0]]) != len(owners) + len(indices):
                in_place += indices
                continue

            storage = standby[indices[0]].untyped_storage()
            for owner in owners:
                owner.data = placed_like(owner, storage)
            self._owners[storage.data_ptr()] = self._owners.pop(address)
            for index in indices:
                served[index], standby[index] = standby[index], served[index]

        if in_place:
            torch._foreach_copy_([served[i] for i in in_place], [standby[i] for i in in_place])
            if served[in_place[0]].is_cuda:
                torch.cuda.current_stream(served[in_place[0]].device).synchronize()
        self.served()

    def stage(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> None:
        """Copy a version into the standby memory."""
        with side_stream(self._load.targets[0].device):
            self._targets = self._targets or self._allocate()
            self._load.copy(manifest, published, self._targets, background=True)

    def discard(self) -> None:
        """Free the standby memory."""
        self._targets = []

    def _allocate(self) -> list[torch.Tensor]:
        """Copy all memory that the load writes, including bytes it leaves alone, such as padding."""
        standby = {memory_of(t): t.untyped_storage().clone() for t in self._load.targets}
        return [placed_like(t, standby[memory_of(t)]) for t in self._load.targets]


def _references(tensor: torch.Tensor) -> int:
    """Return the number of tensors that use this tensor's memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # minus this function's `storage`


Named = tuple[str, torch.Tensor]
Converted = Mapping[str, Sequence[Named]]
"""What takes the place of a published tensor in the engine's loader, by its name."""
Convert = Callable[[Mapping[str, torch.Tensor]], Converted]
"""Converts some of a version's tensors, from whole published ones in host memory."""


class StandbyConversion(StandbyVersion):
    """What an engine computes from a version, such as quantized weights, computed while it generates.

    The engine's loader takes the results instead of the published tensors, so a commit copies and computes
    nothing. They need as much memory of the device as they have bytes, of whole tensors, until they are
    served.
    """

    def __init__(self, convert: Convert, device: torch.device) -> None:
        super().__init__()
        self._convert, self._device = convert, device
        self._converted: Converted = {}

    def stage(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> None:
        """Convert a version."""
        self.discard()  # frees the memory of an older version first
        with side_stream(self._device):
            self._converted = self._convert(published)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def discard(self) -> None:
        """Free the results."""
        self._converted = {}

    def take(self) -> Converted:
        """Return the results, which this object no longer keeps."""
        converted, self._converted = self._converted, {}
        self.served()
        return converted


def replaced(piece: Iterable[Named], converted: Converted) -> list[Named]:
    """Return published tensors with their conversions in their places."""
    return [named for name, tensor in piece for named in converted.get(name, [(name, tensor)])]
