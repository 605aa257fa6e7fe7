# SPDX-License-Identifier: Apache-2.0
"""Validation in an agent loop worker: one call that ends when all its prompts have ended.

verl's call returns as soon as the prompts have begun. If the process dies afterwards, nothing reports that,
and the trainer waits for responses that never come. Ray repeats a call that lasts, in the restarted process,
and raises an error once it does not restart the process any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterator
from contextlib import contextmanager

import transfer_queue as tq

PARTITION = "val"
"""verl's partition of the sample store for validation."""


class OpenPrompts:
    """Prompts of this process that are validated."""

    def __init__(self) -> None:
        self._ends: dict[str, asyncio.Future[None]] = {}

    async def until_ended(self, uids: Collection[str], begin: Awaitable[object]) -> None:
        """Await `begin`, which starts a task for each prompt, and the ends of these tasks.

        Removes what an earlier process has stored for the prompts. Raises the first error of a task.
        """
        await _clear_responses(uids)
        loop = asyncio.get_running_loop()
        ends = {uid: loop.create_future() for uid in uids}
        self._ends.update(ends)
        try:
            await begin
            await asyncio.gather(*ends.values())
        finally:
            for uid in uids:
                self._ends.pop(uid, None)

    @contextmanager
    def answering(self, uid: str) -> Iterator[None]:
        """Enter for as long as the task of a prompt runs."""
        raised: BaseException | None = None
        try:
            yield
        except BaseException as error:
            raised = error
            raise
        finally:
            end = self._ends.get(uid)
            if end is not None and not end.done():
                if raised is None:
                    end.set_result(None)
                else:
                    end.set_exception(raised)


async def _clear_responses(uids: Collection[str]) -> None:
    """Remove the stored responses of prompts: a conversation that an agent does not repeat would stay."""
    stored = (await tq.async_kv_list(partition_id=PARTITION)).get(PARTITION, {})
    own = [key for key, tag in stored.items() if not tag.get("is_prompt") and key.split("_")[0] in uids]
    if own:
        await tq.async_kv_clear(keys=own, partition_id=PARTITION)
