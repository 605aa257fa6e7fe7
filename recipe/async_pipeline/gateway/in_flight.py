# SPDX-License-Identifier: Apache-2.0
"""Bounds of what a worker holds of requests that have no answer yet.

An agent may send any number of requests, and stall in the middle of each body. What has been read of a body,
and what it was decoded into, which takes up to a hundred times the memory, is held until its answer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from starlette.requests import Request

from ..errors import RequestRefused
from .task_routes import TASKS, key_of

MAX_REQUESTS = 64
"""Of a session: more than it may have turns in flight, with clients that try again."""
SESSION_BYTES, WORKER_BYTES = 32 << 20, 256 << 20
BUSY = 429
"""Status of a refusal that a client should try again."""


class InFlight:
    """ASGI middleware. It refuses a request where its handler reads the body, which words the refusal."""

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
