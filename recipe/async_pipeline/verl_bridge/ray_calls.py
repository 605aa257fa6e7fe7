# SPDX-License-Identifier: Apache-2.0
"""Blocking waits of threads, each with a deadline, an owner and a name. On an event loop,
`core.clock.within` does it.
"""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from ..errors import WaitTimeout

T = TypeVar("T")
ASK_S = 60.0
"""For a question that an actor answers from memory; one that is alive takes milliseconds."""


def got(refs: Any, timeout_s: float, *, owner: str, what: str) -> Any:
    """What `ray.get` returns. Raises WaitTimeout: nobody answered in time; else what the actor raised."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError:
        raise WaitTimeout(f"{owner} waited {timeout_s:g} s for {what}") from None


def result_of(future: Future[T], timeout_s: float, *, owner: str, what: str) -> T:
    """What a thread's work comes to. Raises WaitTimeout: it is not done in time; else what it raised."""
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        if future.done():  # an error of its own
            raise
        raise WaitTimeout(f"{owner} waited {timeout_s:g} s for {what}") from None


def cause_of(error: Exception) -> BaseException:
    """What was raised in the other process, if it was another one."""
    return error.cause if isinstance(error, RayTaskError) else error
