# SPDX-License-Identifier: Apache-2.0
"""The server listens on loopback unless another address is set, and leaves signals to the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")
from recipe.async_pipeline.config.knobs.agentic import MAX_UNIX_DIR  # noqa: E402
from recipe.async_pipeline.gateway.server import GatewayServer  # noqa: E402
from tests import HANG_S  # noqa: E402


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def got(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    return await reader.read()


async def require_answer(connection: Connection) -> None:
    assert (await got(*connection)).endswith(b"here\r\n0\r\n\r\n")
    connection[1].close()


async def test_it_listens_on_a_free_port_of_loopback() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    servers = [GatewayServer(app), GatewayServer(app)]
    for server in servers:
        await server.start()
    assert len({server.port for server in servers}) == 2
    for server in servers:
        assert server.url == f"http://127.0.0.1:{server.port}"
        await require_answer(await asyncio.open_connection("127.0.0.1", server.port))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    for server in servers:
        await server.stop()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", server.port)


async def test_agents_on_other_hosts_reach_it_by_an_address_of_the_machine() -> None:
    server = GatewayServer(app, None, "0.0.0.0")
    await server.start()
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    assert host != "0.0.0.0" and int(port) == server.port
    for address in (host, "127.0.0.1"):
        _, writer = await asyncio.open_connection(address, server.port)
        writer.close()
    await server.stop()


async def test_it_also_listens_on_a_unix_socket_of_its_user(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "gateway-12ab.sock"))

    server = GatewayServer(app, str(folder))
    await server.start()
    path = server.unix_socket
    assert path is not None and [*folder.iterdir()] == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    await require_answer(await asyncio.open_unix_connection(str(path)))
    await server.stop()
    assert [*folder.iterdir()] == []


async def test_a_socket_whose_owner_is_in_another_container_is_left_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as full:
        for listening, name in ((other, "gateway-1.sock"), (full, "gateway-2.sock")):
            listening.bind(str(tmp_path / name))
            listening.listen(0)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(str(tmp_path / "gateway-2.sock"))
        server = GatewayServer(app, str(tmp_path))
        await server.start()
        assert len(os.listdir(tmp_path)) == 3
        await server.stop()
        waiting.close()
        assert len(os.listdir(tmp_path)) == 2


async def test_a_server_without_its_unix_socket_is_not_started_and_may_be_started_again(
    tmp_path: Path,
) -> None:
    place = tmp_path / "place"
    place.write_text("no folder")
    server = GatewayServer(app, str(place))
    with pytest.raises(OSError):
        await server.start()
    assert server.port == 0
    place.unlink()
    await server.start()
    await require_answer(await asyncio.open_connection("127.0.0.1", server.port))
    await server.stop()


async def test_the_folder_of_the_unix_socket_is_made_for_its_user_only(tmp_path: Path) -> None:
    server = GatewayServer(app, str(tmp_path / "new"))
    await server.start()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    await server.stop()


async def test_the_longest_folder_of_the_configuration_leaves_room_for_the_name() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        server = GatewayServer(app, f"{place}/{'a' * (MAX_UNIX_DIR - len(place) - 1)}")
        await server.start()
        await server.stop()


def test_a_server_that_was_not_started_stops() -> None:
    asyncio.run(GatewayServer(app).stop())


async def test_connections_without_a_request_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker keeps its files, and a request is served, however many connections an agent opens."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (6, 6))
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            begun.set()
            await may_end.wait()
        await app(scope, receive, send)

    server = GatewayServer(slow)
    await server.start()
    served = await asyncio.open_connection("127.0.0.1", server.port)
    served[1].write(b"GET /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    await begun.wait()
    idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
    for reader, _ in idle[:48]:
        # The end of the stream, or a reset.
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), HANG_S) == b""
    await require_answer(idle[-1])
    await require_answer(await asyncio.open_connection("127.0.0.1", server.port))
    may_end.set()
    assert (await served[0].read()).endswith(b"here\r\n0\r\n\r\n"), "a request in flight is not ended"
    for _, writer in (served, *idle):
        writer.close()
    await server.stop()
