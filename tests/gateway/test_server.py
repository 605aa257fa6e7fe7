# SPDX-License-Identifier: Apache-2.0
"""The server listens on loopback only, and leaves the signals of the process alone."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")
from recipe.async_pipeline.gateway.server import GatewayServer  # noqa: E402


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


def test_it_listens_on_a_free_port_of_loopback() -> None:
    async def test() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        servers = [GatewayServer(app), GatewayServer(app)]
        for server in servers:
            await server.start()
        assert len({server.port for server in servers}) == 2
        for server in servers:
            assert server.url == f"http://127.0.0.1:{server.port}"
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"here\r\n0\r\n\r\n")
            writer.close()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        for server in servers:
            await server.stop()
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", server.port)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_server_that_was_not_started_stops() -> None:
    asyncio.run(GatewayServer(app).stop())
