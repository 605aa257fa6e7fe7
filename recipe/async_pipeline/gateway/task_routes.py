# SPDX-License-Identifier: Apache-2.0
"""The gateway's routes for external runners, and bounds of the requests that have no answer yet."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request

from ..errors import RequestRefused
from .claims import Claims
from .wire import decoded

TASKS = "/v1/tasks/"
"""Where the paths of these routes begin."""
Handler = Callable[[Request], Awaitable[Any]]
MAX_WAIT_S = 60.0
"""Longest wait for a task in one request, so that no proxy or client gives it up."""


class _Claim(msgspec.Struct):
    wait_s: float = 0.0


class _Finish(msgspec.Struct):
    reward: float | None = None


class _Fail(msgspec.Struct):
    why: str = ""


class TaskRoutes:
    """Each method handles a request. Raises RequestRefused."""

    def __init__(self, claims: Claims, body: Callable[[Request], Awaitable[bytes]]) -> None:
        self._claims, self._body = claims, body

    async def claim(self, request: Request) -> Any:
        """Return a task with its lease, or None if there is no task."""
        if not secrets.compare_digest(key_of(request).encode(), self._claims.key.encode()):
            raise RequestRefused("this needs the run key", status=401)
        wait_s = (await self._read(request, _Claim)).wait_s
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise RequestRefused(f"wait_s must be between 0 and {MAX_WAIT_S:g}, got {wait_s}", status=422)
        claiming = asyncio.ensure_future(self._claims.claim(wait_s))
        leaving = asyncio.ensure_future(_disconnected(request))
        leaving.add_done_callback(lambda _: claiming.cancel())
        try:
            found = await claiming
        except asyncio.CancelledError:
            if not leaving.done():
                raise
            # A runner that has died would hold a task until its lease expires.
            raise RequestRefused("the client disconnected", status=400) from None
        finally:
            leaving.cancel()
        return None if found is None else found._asdict()

    async def renew(self, request: Request) -> Any:
        """Start the time of a lease again."""
        self._claims.renew(key_of(request))
        return {}

    async def finish(self, request: Request) -> Any:
        """End a task with its reward."""
        reward = (await self._read(request, _Finish)).reward
        if reward is not None and not math.isfinite(reward):
            raise RequestRefused(f"reward must be a finite number, got {reward}", status=422)
        self._claims.finish(key_of(request), reward)
        return {}

    async def fail(self, request: Request) -> Any:
        """End a task that cannot be played."""
        self._claims.fail(key_of(request), (await self._read(request, _Fail)).why)
        return {}

    async def _read(self, request: Request, kind: Any) -> Any:
        return decoded(await self._body(request) or b"{}", kind)


async def _disconnected(request: Request) -> None:
    """Wait until the client hangs up. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def key_of(request: Request) -> str:
    """Return the key that a request presents."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("x-api-key", "")
    return key.strip()


MAX_REQUESTS = 64
"""Of a session: more than it may have turns in flight, with clients that try again."""
SESSION_BYTES, WORKER_BYTES = 32 << 20, 256 << 20
BUSY = 429
"""Status of a refusal that a client should try again."""


class InFlight:
    """Bounds of what a worker holds of requests that have no answer yet, as ASGI middleware.

    An agent may send any number of requests, and stall in the middle of each body. What has been read of a
    body, and what it was decoded into, which takes up to a hundred times the memory, is held until its
    answer. A request is refused where its handler reads the body, which words the refusal.
    """

    def __init__(
        self, app: Any, session_bytes: int = SESSION_BYTES, worker_bytes: int = WORKER_BYTES
    ) -> None:
        self._app = app
        self._session_bytes, self._worker_bytes = session_bytes, worker_bytes
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request. Raises what the application raises."""
        if scope["path"].startswith(TASKS):
            # All runners wait for tasks with one key, which agents do not have.
            await self._app(scope, receive, send)
            return
        key = key_of(Request(scope))
        refused = self._requests[key] >= MAX_REQUESTS
        size = 0

        async def counted() -> Any:
            nonlocal size
            if refused:
                raise RequestRefused(
                    f"the session has {MAX_REQUESTS} requests without an answer", status=BUSY
                )
            message = await receive()
            added = len(message.get("body", b""))
            size += added
            self._bytes[key] += added
            if added and self._bytes[key] > self._session_bytes:
                what = f"the requests of the session without an answer exceed {self._session_bytes} bytes"
                raise RequestRefused(what, status=BUSY)
            if added and self._bytes.total() > self._worker_bytes:
                raise RequestRefused(
                    "the worker has too many bytes of requests without an answer", status=BUSY
                )
            return message

        self._requests[key] += 1
        try:
            await self._app(scope, counted, send)
        finally:
            self._requests[key] -= 1
            self._bytes[key] -= size
            if not self._requests[key]:
                del self._requests[key], self._bytes[key]
