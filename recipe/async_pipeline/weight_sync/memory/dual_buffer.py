# SPDX-License-Identifier: Apache-2.0
"""Which of two slots holds the newest complete version and which may be filled. Holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import WeightSyncError


@dataclass
class DualBuffer:
    """Two slots: one complete, one being filled. Versions only increase."""

    ready_slot: int | None = None
    ready_version: int | None = None
    filling_version: int | None = None

    def begin_fill(self, version: int) -> int:
        """Return the slot to write `version` into; never the complete one.

        Raises WeightSyncError if another fill is open or the version is not newer than the complete one.
        """
        if self.filling_version is not None:
            raise WeightSyncError(f"v{version} offered while v{self.filling_version} is still filling")
        if self.ready_version is not None and version <= self.ready_version:
            raise WeightSyncError(
                f"v{version} offered after v{self.ready_version}; versions only move forward"
            )
        self.filling_version = version
        return 0 if self.ready_slot is None else 1 - self.ready_slot

    def commit(self) -> int:
        """Declare the filled slot complete; return its version. Raises WeightSyncError if no fill is open."""
        if self.filling_version is None:
            raise WeightSyncError("commit without begin_fill")
        self.ready_slot = 0 if self.ready_slot is None else 1 - self.ready_slot
        self.ready_version, self.filling_version = self.filling_version, None
        return self.ready_version

    def abort(self) -> None:
        """Abandon the fill; the complete slot stays unchanged."""
        self.filling_version = None
