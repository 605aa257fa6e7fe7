# SPDX-License-Identifier: Apache-2.0
"""A second copy of the served weights on the engine's device, filled while the engine generates.

It has the engine's layout, so serving it takes a copy within the device. If only the parameters refer to
their memory, the two memories are exchanged instead. The copy needs as much memory as the weights.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch

from ..errors import WeightSyncError
from .copy_plan import RecordedLoad, memory_of, placed_like
from .manifest import Manifest

COPY_S = 600.0
"""Deadline for the copy from host memory to the device, which takes seconds during generation."""

Ended = Callable[[BaseException | None], None]
"""Gets the error of a copy, or None."""


def ignore(error: BaseException | None) -> None:
    """Do nothing: `StandbyCopy.version` returns the version or raises the error as well."""


class StandbyCopy:
    """The copy of all memory that a recorded load writes."""

    def __init__(self, load: RecordedLoad, parameters: Iterable[torch.Tensor], *, may_exchange: bool) -> None:
        """`may_exchange` is False if addresses were recorded, as in the graphs of an accelerator."""
        self._load, self._may_exchange = load, may_exchange
        self._owners: dict[int, list[torch.Tensor]] = defaultdict(list)
        for parameter in {id(p): p for p in parameters}.values():
            self._owners[memory_of(parameter)].append(parameter)
        self._targets: list[torch.Tensor] = []
        self._wanted: int | None = None
        """The version that `begin` was last called with, until it is served."""
        self._ended: dict[int, BaseException | None] = {}
        """The error of that version's copy, or None, once the copy has ended."""
        self._thread: threading.Thread | None = None

    def begin(self, manifest: Manifest, published: Mapping[str, torch.Tensor], ended: Ended = ignore) -> None:
        """Fill the copy with a version, in a thread, which calls `ended` last.

        The thread first waits for that of an older version, whose copy is void. If the arena is written
        before `version` returns this version, the copy must not be committed.
        """
        self._wanted = manifest.version
        self._thread = threading.Thread(
            target=self._fill,
            args=(self._thread, manifest, published, ended),
            name=f"standby copy of v{manifest.version}",
            daemon=True,
        )
        self._thread.start()

    def version(self) -> int | None:
        """Return the complete version that is not served yet, or None. Raises the error of the copy."""
        wanted = self._wanted
        if wanted is None or wanted not in self._ended:
            return None
        error = self._ended[wanted]
        if error is not None:
            raise error
        return wanted

    def join(self) -> None:
        """Wait for the copy. Raises WeightSyncError if it does not end in time."""
        if self._thread is not None:
            self._thread.join(COPY_S)
            if self._thread.is_alive():
                raise WeightSyncError(
                    f"{self._thread.name} did not end within {COPY_S:g} s; the engine must restart"
                )

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
                torch.cuda.current_stream().synchronize()
        self._wanted = None

    def _fill(
        self,
        older: threading.Thread | None,
        manifest: Manifest,
        published: Mapping[str, torch.Tensor],
        ended: Ended,
    ) -> None:
        if older is not None:
            older.join()
        failed: BaseException | None = None
        try:
            device = self._load.targets[0].device
            on_device = device.type == "cuda"
            with torch.cuda.stream(torch.cuda.Stream(device)) if on_device else nullcontext():
                self._targets = self._targets or self._allocate()
                self._load.copy(manifest, published, self._targets, background=True)
        except BaseException as error:  # noqa: BLE001  the next call for the version raises it
            failed = error
        self._ended = {manifest.version: failed}
        ended(failed)

    def _allocate(self) -> list[torch.Tensor]:
        """Copy all memory that the load writes, including bytes it leaves alone, such as padding."""
        standby = {memory_of(t): t.untyped_storage().clone() for t in self._load.targets}
        return [placed_like(t, standby[memory_of(t)]) for t in self._load.targets]


def _references(tensor: torch.Tensor) -> int:
    """Return the number of tensors that use this tensor's memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # minus this function's `storage`
