# SPDX-License-Identifier: Apache-2.0
"""Count the host memory that weight updates use."""

from __future__ import annotations

from contextlib import suppress

from ....weight_sync.memory.segment_names import PREFIX, SHM_DIR

BLOCK = 512
"""Unit of `st_blocks`."""


def host_memory_bytes() -> int:
    """Return the bytes that all segments of this package occupy in shared memory of this host.

    Arenas keep their memory from one update to the next, so its size after an update is the peak.
    """
    occupied = 0
    for path in SHM_DIR.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # its owner may remove it meanwhile
            occupied += path.stat().st_blocks * BLOCK
    return occupied
