# SPDX-License-Identifier: Apache-2.0
"""A second copy of the served weights on the engine's device, filled while the engine generates.

It has the engine's layout, so serving it takes a copy within the device. If only the parameters refer to
their memory, the two memories are exchanged instead. The copy needs as much memory as the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from ...memory.manifest import Manifest
from ..copy_plan import RecordedLoad, memory_of, placed_like
from .standby_version import StandbyVersion, side_stream


class StandbyCopy(StandbyVersion):
    """The copy of all memory that a recorded load writes."""

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
