# SPDX-License-Identifier: Apache-2.0
"""What a consumer of published weights has to do."""

from __future__ import annotations

from typing import Protocol

from ...core.groups.items import LoadReport
from ..memory.manifest import WeightTicket


class Consumer(Protocol):
    """A process group that computes with published weights."""

    name: str

    async def prepare(self, ticket: WeightTicket) -> None:
        """Fetch, check and stage one version, while the previous one is served.

        Replaces the preparation of an older version, also one that still runs: its call may have been
        cancelled. Preparing a version again that is prepared already does nothing. Raises if it fails; the
        previous version is then served as before.
        """

    async def commit(self, version: int) -> LoadReport:
        """Load and verify the version that `prepare` has prepared, and serve it afterwards.

        The consumer computes nothing meanwhile. It may read the memory that it prepared from, which a later
        version overwrites: each host keeps two. Committing
        the served version again does nothing. Raises if it fails; it is then unknown what is served.
        """

    async def leave(self) -> None:
        """Get no more work. Called after a failure, so it must work without the consumer's help."""

    async def end(self) -> None:
        """End what is left of its processes, whatever their state."""

    async def start(self) -> None:
        """Start without weights."""

    async def join(self) -> None:
        """Get work again."""

    async def check(self) -> None:
        """Return if the consumer works; raise the error that it died of. If it is stuck, this never
        returns.
        """

    async def open_requests(self) -> int:
        """Return the number of requests that it works on."""

    async def release(self) -> None:
        """Free its devices. Called once, after `end`."""
