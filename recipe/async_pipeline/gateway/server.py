# SPDX-License-Identifier: Apache-2.0
"""uvicorn in an event loop that exists already, on a free port and, if wanted, a Unix socket.

unix_dir/gateway-RANDOM.sock   removed at the end; after a kill, by the next gateway that uses the folder

A connection, and not the number of a process, tells whether a socket has an owner: containers number their
processes independently, and may share the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..core.waits.deadline import within

HOST = "127.0.0.1"
START_S = 30.0
STOP_S = 5.0
POLL_S = 0.01
BACKLOG = 2048
PREFIX, SUFFIX = "gateway-", ".sock"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals belong to the owner of the process.
        yield


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection. If there are too many, the oldest one without a request is closed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.made = self.loop.time()
        if len(self.connections) > _most_connections():
            waiting = [one for one in self.connections if one.cycle is None or one.cycle.response_complete]
            oldest = min(waiting, key=lambda one: (one.cycle is not None, one.made))
            # uvicorn does so only later, perhaps after many more have been accepted.
            self.connections.discard(oldest)
            oldest.transport.abort()


class GatewayServer:
    """Serves one ASGI application. Belongs to the loop in which it was started."""

    def __init__(self, app: Any, unix_dir: str | None = None, host: str = HOST) -> None:
        """`unix_dir`: of the Unix socket, only for the run's user; `host`: the address of the port."""
        self._host = host
        self._config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            http=_Connection,
            backlog=max(1, min(BACKLOG, _most_connections() // 2)),
        )
        self._server: _Server
        self._task: asyncio.Task[None] | None = None
        self.port = 0
        self.unix_socket: Path | None = None
        """Where it also listens, if `unix_dir` is given."""
        if unix_dir is not None:
            # `config.knobs.agentic.MAX_UNIX_DIR` leaves 26 bytes for the name.
            name = f"{PREFIX}{secrets.token_hex(4)}{SUFFIX}"
            self.unix_socket = Path(unix_dir).expanduser().absolute() / name

    @property
    def url(self) -> str:
        """Where agents reach it."""
        host = _reachable(self._host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises OSError, and WaitTimeout if the server does not begin to serve.

        Nothing listens after an error, and the call may be repeated.
        """
        self._server = _Server(self._config)
        sockets = [_listener(self._host)]
        try:
            if self.unix_socket is not None:
                sockets.append(_unix_listener(self.unix_socket))
            self._task = asyncio.create_task(self._server.serve(sockets=sockets), name="gateway")
            await within(self._begun(), START_S, owner="an agent loop worker", what="the gateway to listen")
        except BaseException:
            await self.stop()
            for one in sockets:
                one.close()
            raise
        self.port = sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening, and end the connections."""
        if self._task is None:
            return
        self._server.should_exit = True
        self._server.force_exit = True
        await asyncio.wait({self._task}, timeout=STOP_S)
        if self.unix_socket is not None:
            self.unix_socket.unlink(missing_ok=True)

    async def _begun(self) -> None:
        assert self._task is not None
        while not self._server.started:
            if self._task.done():
                await self._task
                raise OSError("the gateway's server ended while it started")
            # uvicorn offers no event for it.
            await asyncio.sleep(POLL_S)


def _most_connections() -> int:
    """Return how many connections may be open, so that files are left for the worker."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _reachable(host: str) -> str:
    """Return an address of this machine in place of the one that stands for all of them."""
    if not ipaddress.ip_address(host).is_unspecified:
        return host
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the kernel only chooses the address that it would send from.
            probe.connect((elsewhere, 9))
        except OSError:
            return "::1" if ":" in host else HOST
        return str(probe.getsockname()[0])


def _listener(host: str) -> socket.socket:
    """Return a socket that listens on a free port. Raises OSError."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, 0))
    listening.listen(BACKLOG)
    return listening


def _unix_listener(path: Path) -> socket.socket:
    """Return a socket that listens there. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in path.parent.glob(f"{PREFIX}*{SUFFIX}"):
        if _is_abandoned(other):
            other.unlink(missing_ok=True)
    # Others take a socket that does not listen yet for an abandoned one.
    unnamed = path.with_name(f".{path.name}")
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(unnamed))
        # Permission to write the file is permission to connect; each request needs a key as well.
        unnamed.chmod(0o600)
        listening.listen(BACKLOG)
        unnamed.rename(path)
    except BaseException:
        listening.close()
        unnamed.unlink(missing_ok=True)
        raise
    return listening


def _is_abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        # A gateway whose backlog is full must not block this one.
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
