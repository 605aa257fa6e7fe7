# SPDX-License-Identifier: Apache-2.0
"""The recall of a group in generation: data that the generating code reads, not a cancellation of its task.

A task is cancelled only when the run is being stopped, so the two can never be confused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from ...errors import StageProtocolError

T = TypeVar("T")
RecallVerdict = Literal["regenerate", "drop"]
"""What becomes of a recalled group: its responses are generated again, or it is given up."""


class Recall:
    """Whether the message queue has recalled one group that is being generated.

    `MessageQueue.watch` makes it, the queue gives it, and `PipelineTrainer.generate_group` ends early when
    it is given.
    """

    def __init__(self) -> None:
        self.verdict: RecallVerdict | None = None
        """None until the group is recalled."""
        self._calls: dict[Callable[[], object], None] = {}

    def give(self, verdict: RecallVerdict) -> None:
        """Recall the group. Raises StageProtocolError if it was recalled before."""
        if self.verdict is not None:
            raise StageProtocolError(f"a group was recalled twice: {self.verdict}, then {verdict}")
        self.verdict = verdict
        for call in tuple(self._calls):
            call()

    def subscribe(self, call: Callable[[], object]) -> None:
        """Call `call` when the group is recalled; at once if it has been."""
        self._calls[call] = None
        if self.verdict is not None:
            call()

    async def or_done(self, work: asyncio.Future[T]) -> None:
        """Return when `work` is done or the group is recalled; `work` is not touched."""
        changed = asyncio.get_running_loop().create_future()

        def wake(_: object = None) -> None:
            if not changed.done():
                changed.set_result(None)

        work.add_done_callback(wake)
        self.subscribe(wake)
        try:
            await changed
        finally:
            work.remove_done_callback(wake)
            del self._calls[wake]

    async def bound(self, work: Awaitable[T]) -> T | None:
        """Return the result of `work`, or None if the group is recalled first.

        In every case `work` has ended by then: it is cancelled on a recall, and if the caller is
        cancelled. It may still return a result on a recall, which is returned. Raises what `work` raises.
        """
        task = asyncio.ensure_future(work)
        try:
            await self.or_done(task)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return None if task.cancelled() and self.verdict is not None else task.result()
