# SPDX-License-Identifier: Apache-2.0
"""The server listens on loopback only, and leaves the signals of the process alone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
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


def test_it_also_listens_on_a_unix_socket_of_its_user(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    stale = folder / "gateway-999999999.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))

    async def test() -> None:
        server = GatewayServer(app, str(folder))
        await server.start()
        path = server.unix_socket
        assert path == folder / f"gateway-{os.getpid()}.sock" and [*folder.iterdir()] == [path]
        assert path.stat().st_mode & 0o777 == 0o600
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"here\r\n0\r\n\r\n")
        writer.close()
        await server.stop()
        assert [*folder.iterdir()] == []

    asyncio.run(asyncio.wait_for(test(), 30))


def test_the_folder_of_the_unix_socket_is_made_for_its_user_only(tmp_path: Path) -> None:
    async def test() -> None:
        server = GatewayServer(app, str(tmp_path / "new"))
        await server.start()
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
        await server.stop()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_server_that_was_not_started_stops() -> None:
    asyncio.run(GatewayServer(app).stop())
