# SPDX-License-Identifier: Apache-2.0
"""Pass Ctrl-C from the command to the trainer's actor, so that the run can close its files.

Ray does not interrupt a running task of a named actor; it only sets a flag that the task can poll.

    the command                        the trainer's process
    KeyboardInterrupt ── ray.cancel ─► polls the flag every POLL_S ─► cancels the run's coroutine
    waits for at most END_S ◄───────── writes the summary, closes the ledger, ends
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import ray

T = TypeVar("T")
POLL_S = 0.5
"""Seconds between two polls of Ray's cancellation flag."""
END_S = 10.0
"""Seconds for the run to write its summary and close its files; `watch` kills the rest after twice that."""


def wait_for(running: Any) -> None:
    """Wait for a run, given as its ObjectRef, to end, successfully or not.

    Raises KeyboardInterrupt on Ctrl-C, after cancelling the run and waiting at most END_S for its end.
    """
    try:
        ray.wait([running])
    except KeyboardInterrupt:
        ray.cancel(running, recursive=False)  # the run cancels its own calls
        ray.wait([running], timeout=END_S)
        raise


async def until_cancelled(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result, or cancel it once the surrounding Ray task is cancelled.

    Raises any error of `work`, and CancelledError, also inside `work`, if the task was cancelled.
    """
    running = asyncio.ensure_future(work)
    cancelled = asyncio.create_task(_wait_for_cancellation())
    try:
        await asyncio.wait((running, cancelled), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (running, cancelled):
            task.cancel()
        await asyncio.wait((running, cancelled))

    if not cancelled.cancelled():
        cancelled.result()  # raises if the poll itself failed
    return running.result()


async def _wait_for_cancellation() -> None:
    """Return once Ray has marked the surrounding task as cancelled."""
    while not ray.get_runtime_context().is_canceled():  # noqa: ASYNC110 - Ray has a flag, not an event
        await asyncio.sleep(POLL_S)
