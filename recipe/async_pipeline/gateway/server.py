# SPDX-License-Identifier: Apache-2.0
"""uvicorn in an event loop that exists already, on a free port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from ..core.deadline import within

HOST = "127.0.0.1"
START_S = 30.0
STOP_S = 5.0
POLL_S = 0.01


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals belong to the owner of the process.
        yield


class GatewayServer:
    """Serves one ASGI application. Belongs to the loop in which it was started."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(app, ws="none", lifespan="off", log_level="error", access_log=False)
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises OSError, and WaitTimeout if the server does not begin to serve."""
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, 0))
        listening.listen(2048)
        self.port = listening.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name="gateway")
        await within(self._begun(), START_S, owner="an agent loop worker", what="the gateway to listen")

    async def stop(self) -> None:
        """Stop listening, and end the connections."""
        if self._task is None:
            return
        self._server.should_exit = True
        self._server.force_exit = True
        await asyncio.wait({self._task}, timeout=STOP_S)

    async def _begun(self) -> None:
        assert self._task is not None
        while not self._server.started:
            if self._task.done():
                await self._task
                raise OSError("the gateway's server ended while it started")
            # uvicorn offers no event for it.
            await asyncio.sleep(POLL_S)
