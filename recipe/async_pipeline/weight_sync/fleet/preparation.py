# SPDX-License-Identifier: Apache-2.0
"""What a consumer has to do, what it has prepared, and which version it is preparing now.

A version is prepared while the previous one is served, and nothing is lost if a newer one takes its place. So
the newest call wins: it ends the preparation of an older version, whose caller may have gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from ...core.groups.items import LoadReport
from ...errors import WeightSyncError
from ..memory.manifest import WeightTicket

T = TypeVar("T")


class Preparation(Generic[T]):
    """At most one prepared version, or one that is being prepared."""

    def __init__(self, owner: str) -> None:
        """`owner` names the consumer in errors."""
        self._owner = owner
        self._version: int | None = None
        self._work: asyncio.Task[T] | None = None

    async def prepare(self, version: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work` for a version, which runs unless it has run or runs already.

        Ends the preparation of an older version first. If this call is cancelled, the preparation continues.
        Raises what `work` raises, and WeightSyncError if a newer version takes its place or has already done
        so.
        """
        if self._version is not None and version < self._version:
            raise WeightSyncError(
                f"{self._owner} prepares v{self._version} and was offered v{version}; versions only move "
                "forward"
            )
        if version != self._version or self._failed():
            self._begin(version, work)
        running = self._work
        assert running is not None
        await asyncio.wait({running})
        if self._version != version:
            raise WeightSyncError(f"v{version} was replaced by v{self._version} during its preparation")
        return running.result()

    def prepared(self, version: int) -> T:
        """Return what was prepared for a version. Raises WeightSyncError if it was not."""
        if version != self._version or self._work is None or not self._work.done() or self._failed():
            raise WeightSyncError(
                f"{self._owner} cannot load v{version}, which it has not prepared; prepare it first"
            )
        return self._work.result()

    def drop(self) -> None:
        """Forget what was prepared, because it is served now."""
        if self._work is not None and self._work.done():
            self._work = None

    def _begin(self, version: int, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        old, self._version = self._work, version
        self._work = asyncio.create_task(_after(old, work), name=f"prepare v{version}")
        self._work.add_done_callback(_retrieve)
        if old is not None:
            old.cancel()

    def _failed(self) -> bool:
        work = self._work
        return work is None or (work.done() and (work.cancelled() or work.exception() is not None))


async def _after(old: asyncio.Task[T] | None, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` once an older task has ended."""
    if old is not None:
        await asyncio.wait({old})
    return await work()


async def to_the_end(function: Callable[[], T]) -> T:
    """Run a function in a thread. If cancelled, it first waits for the thread, which cannot be stopped.

    A second cancellation does not shorten this wait: the function may write into memory that is reused next.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(function))
    thread.add_done_callback(_retrieve)
    cancelled: asyncio.CancelledError | None = None
    while not thread.done():
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is not None:
        raise cancelled
    return thread.result()


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Mark an error as seen, because its caller may have gone."""
    if not done.cancelled():
        done.exception()


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
        """Return if the consumer works; raise the error that it died of. Never returns if it is stuck."""

    async def open_requests(self) -> int:
        """Return the number of requests that it works on."""

    async def release(self) -> None:
        """Free its devices. Called once, after `end`."""
