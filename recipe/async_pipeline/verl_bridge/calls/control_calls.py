# SPDX-License-Identifier: Apache-2.0
"""Control calls of an actor that serves many requests: they never wait behind the requests.

Ray runs at most `max_concurrency` calls of an async actor; further calls wait, a weight update behind
thousands of requests too. A concurrency group has a separate limit. Ray also gives each group a thread with
an event loop, while engines and asyncio objects belong to the loop of the other methods; `control` therefore
runs the method there, and only the wait for a free call is separate.

Shared by the rollout servers of all engines and the agent loop workers: the class derives from
`ControlCalls`, marks its methods with `control`, and is made an actor with `concurrency_groups=GROUPS`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import ray

R = TypeVar("R")
ControlMethod = Callable[..., Coroutine[Any, Any, R]]

CONTROL = "control"
"""Short calls: checks, reports of what was generated."""
GIVE_UP = "give_up"
"""Ends of requests: a recall sends one for each request of a group."""
LOAD = "load"
"""Preparations and commits of weights, which take as long as a weight update."""
GROUPS: Mapping[str, int] = {CONTROL: 256, GIVE_UP: 1000, LOAD: 4}
"""Concurrent calls of each group; a call that hangs holds up none of another group.

GIVE_UP has Ray's default for async actors. One preparation or commit runs at a time; the others were
abandoned and are about to end.
"""


class ControlCalls:
    """Base of an async actor with control calls."""

    _requests_loop: asyncio.AbstractEventLoop | None = None

    def serve_control_calls(self) -> None:
        """Run control calls on the event loop that runs now. Call it from a method without a group."""
        self._requests_loop = asyncio.get_running_loop()


def control(group: str) -> Callable[[ControlMethod[R]], ControlMethod[R]]:
    """Mark an async method of a `ControlCalls` as a control call in a group of `GROUPS`.

    Called from the same process, before `serve_control_calls` or on its loop, it is the plain method.
    """

    def mark(method: ControlMethod[R]) -> ControlMethod[R]:
        # Ray reads the mark from the innermost function, which it gets through `__wrapped__`.
        ray.method(concurrency_group=group)(method)

        @functools.wraps(method)
        async def call(self: ControlCalls, *args: Any, **kwargs: Any) -> R:
            work, loop = method(self, *args, **kwargs), self._requests_loop
            if loop is None or loop is asyncio.get_running_loop():
                return await work
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

        return call

    return mark
