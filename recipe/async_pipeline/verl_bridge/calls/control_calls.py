# SPDX-License-Identifier: Apache-2.0
"""Control calls of an actor that serves many requests: they never wait behind the requests.

Ray runs at most `max_concurrency` calls of an async actor; further calls wait, a weight update behind
thousands of requests too. A concurrency group has a separate limit. Ray also gives each group a thread with
an event loop, while engines and asyncio objects belong to the loop of the other methods; `control` therefore
runs the method there, and only the wait for a free call is separate.

Shared by the rollout servers of all engines and the agent loop workers: the class derives from
`ControlCalls`, marks its methods with `control`, and is made an actor with `concurrency_groups=GROUPS`, a
server by `server_actor`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from collections import deque
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


def server_actor(cls: type) -> Any:
    """Return an actor class with the methods and calls of the server `cls`, which only its process imports.

    A process that gets a handle loads the actor's class. Of a plain one, the balancer and each agent loop
    worker would import the whole engine. `cls` must be at the top of its module, without generators.
    """

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        module = importlib.import_module(home)
        self._server = getattr(module, name)(*args, **kwargs)

    home, name = cls.__module__, cls.__name__
    start.__signature__ = _plain_signature(cls.__init__)  # type: ignore[attr-defined, misc]
    methods = inspect.getmembers(cls, inspect.isfunction)
    passed = {key: _passed_on(key, method) for key, method in methods if not key.startswith("__")}
    return ray.remote(concurrency_groups=dict(GROUPS))(type(name, (), {**passed, "__init__": start}))


def _passed_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `name` of the server, with the signature and Ray's marks of `method`."""

    async def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._server, name)(*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._server, name)(*args, **kwargs)

    made = answer if inspect.iscoroutinefunction(method) else call
    marks = {key: mark for key, mark in vars(inspect.unwrap(method)).items() if key.startswith("__ray_")}
    vars(made).update(marks, __name__=name, __signature__=_plain_signature(method))
    return made


def _plain_signature(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature without annotations, which may name types of an engine."""
    found = inspect.signature(method)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    return found.replace(parameters=plain, return_annotation=inspect.Signature.empty)


PER_TURN = 4
"""Calls that begin in one turn of the event loop."""


class PacedStarts:
    """Grants starts in the order in which they are requested. For one event loop.

    An event loop runs everything that is ready before it looks for new work. Thousands of requests that
    arrive at once would all begin first, and each of them takes about a millisecond; a control call would
    wait behind all of them.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = self._room = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._next: asyncio.Handle | None = None

    async def turn(self) -> None:
        """Return when this call may begin. Waits for: at most the next turns of the event loop."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.call_soon(self._begin_turn)
        if self._room and not self._waiting:
            self._room -= 1
            return
        granted: asyncio.Future[None] = loop.create_future()
        self._waiting.append(granted)
        await granted

    def _begin_turn(self) -> None:
        self._room, self._next = self._per_turn, None
        while self._waiting and self._room:
            granted = self._waiting.popleft()
            # A cancelled call takes no place.
            if not granted.done():
                granted.set_result(None)
                self._room -= 1
        if self._waiting:
            self._next = asyncio.get_running_loop().call_soon(self._begin_turn)
