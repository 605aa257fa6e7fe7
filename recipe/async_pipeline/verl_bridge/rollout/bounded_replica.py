# SPDX-License-Identifier: Apache-2.0
"""What the replica classes of all engines share: their servers begin each request that clients may send."""

from __future__ import annotations

from typing import Any

OTHER_CALLS = 16
"""verl's calls of a server that are neither requests nor control calls."""


class BoundedReplica:
    """Base of a replica class, before verl's class."""

    def __init__(self, *args: Any, max_open_requests: int, **kwargs: Any) -> None:
        """`max_open_requests`: see `config.derived.scheduling`."""
        super().__init__(*args, **kwargs)
        self._max_open_requests = max_open_requests

    @property
    def max_concurrency(self) -> int:
        """Calls that a server runs at once, besides its control calls. verl starts a server with it."""
        at_least: int = super().max_concurrency  # type: ignore[misc]
        return max(at_least, self._max_open_requests + OTHER_CALLS)
