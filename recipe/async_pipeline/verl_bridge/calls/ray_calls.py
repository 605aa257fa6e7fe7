# SPDX-License-Identifier: Apache-2.0
"""Blocking waits in threads, with a deadline and an error that names the owner and the awaited work.

On an event loop, use `core.waits.deadline.within`.
"""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from ...errors import WaitTimeout

T = TypeVar("T")
ASK_S = 60.0
"""Timeout of a request that an actor serves from memory, normally in milliseconds."""


def got(refs: Any, timeout_s: float | None, *, owner: str, what: str) -> Any:
    """Return the result of `ray.get`. Raises WaitTimeout after `timeout_s` (None: no limit), and any error of
    the actor.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError:
        raise WaitTimeout(f"{owner} waited {timeout_s:g} s for {what}") from None


def result_of(future: Future[T], timeout_s: float, *, owner: str, what: str) -> T:
    """Return the result of a future. Raises WaitTimeout after `timeout_s`, and any error of its work."""
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        if future.done():
            # The work itself raised a TimeoutError.
            raise
        raise WaitTimeout(f"{owner} waited {timeout_s:g} s for {what}") from None


def cause_of(error: BaseException) -> BaseException:
    """Return the error that was raised in the actor's process, or `error` if it was raised in this one."""
    return error.cause if isinstance(error, RayTaskError) else error
