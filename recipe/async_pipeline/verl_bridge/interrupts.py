# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C reaches the command, but the run is in an actor of its own, and Ray ends no task of such an actor:
it tells it.

the command                      the trainer's process
KeyboardInterrupt ─ ray.cancel ─► asks twice a second ─► its coroutine is cancelled, as asyncio does at Ctrl-C
waits END_S at most ◄──────────── writes down what it has, and ends
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import ray

T = TypeVar("T")
POLL_S = 0.5
END_S = 10.0
"""Seconds for the run to write its summary and to close its files; `watch` kills what is left after twice
that.
"""


def wait_for(running: Any) -> None:
    """Return when a run, a ref of Ray, has ended in whichever way.

    Raises KeyboardInterrupt: somebody pressed Ctrl-C; the run was told so, and has ended or had END_S seconds
    for it.
    """
    try:
        ray.wait([running])
    except KeyboardInterrupt:
        ray.cancel(running, recursive=False)  # what the run has asked of others, it gives up itself
        ray.wait([running], timeout=END_S)
        raise


async def until_cancelled(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. Raises CancelledError, in it too: the task of Ray that this runs in
    was cancelled.
    """
    running = asyncio.ensure_future(work)
    asking = asyncio.create_task(_told())
    try:
        await asyncio.wait((running, asking), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (running, asking):
            task.cancel()
        await asyncio.wait((running, asking))
    if not asking.cancelled():
        asking.result()  # an error of Ray, if it is one
    return running.result()


async def _told() -> None:
    """Returns once Ray says that the task which it is called in is cancelled."""
    while not ray.get_runtime_context().is_canceled():  # noqa: ASYNC110 - Ray sets a flag in its C++ core, and wakes nobody
        await asyncio.sleep(POLL_S)
