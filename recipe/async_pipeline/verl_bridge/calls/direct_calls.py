# SPDX-License-Identifier: Apache-2.0
"""Calls of an actor's methods over a Unix socket, for actors on the same host.

A call through Ray wakes several threads in each of the two processes and serializes each argument separately.
For a short turn of a conversation, that costs more CPU time than everything else. A message between the two
event loops costs a tenth of it.

Ray stays in charge: it starts the actors, tells the address, and carries calls between hosts, calls with
large arguments, and all calls while the socket fails. A caller gets the same results and the same errors.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import secrets
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ray import ObjectRef
from ray.exceptions import RayTaskError, TaskCancelledError

from ...core.waits.deadline import within
from .ray_calls import ASK_S

logger = logging.getLogger(__name__)
LARGEST_BYTES = 1 << 20
"""Calls with larger arguments go through Ray, which shares large arrays instead of copying them."""
RETRY_S = 30.0
"""Seconds for which an actor is called through Ray after a failure."""
_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")
Method = Callable[..., Awaitable[Any]]


class ConnectionLost(ConnectionError):
    """The connection ended during a call, so it is unknown whether the method has run."""


class Address(NamedTuple):
    """Where an actor takes calls."""

    host: str
    """The boot id of its host."""
    name: str
    """The name of its socket in Linux's abstract namespace, which leaves no file behind."""
    methods: tuple[str, ...]
    """The methods that can be called there; calls of others go through Ray."""


@cache
def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class _Messages(asyncio.Protocol):
    """Splits a stream into messages. A peer of another user, or in a sandbox, is refused: messages are
    unpickled."""

    transport: Any = None

    def __init__(self) -> None:
        self._received = bytearray()
        self._to_send: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        if not _is_trusted(transport):
            transport.abort()
        else:
            self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            return
        self._received += data
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            self.message_received(message)

    def send(self, message: bytes) -> None:
        """Send a message, together with all others of this turn of the event loop."""
        if not self._to_send:
            asyncio.get_running_loop().call_soon(self._flush)
        self._to_send += (_LENGTH.pack(len(message)), message)

    def _flush(self) -> None:
        parts, self._to_send = self._to_send, []
        if self.transport is not None:
            self.transport.write(b"".join(parts))

    def message_received(self, message: bytes) -> None:
        raise NotImplementedError


def _is_trusted(transport: Any) -> bool:
    """Return whether a peer is a process of this user, and not in the sandbox of an agent."""
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as peer:
        packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    try:
        return uid == os.getuid() and os.path.samefile(f"/proc/{pid}/ns/user", "/proc/self/ns/user")
    except OSError:  # it has ended, or is in a namespace of processes that is hidden from this one
        return False


class _Callee(_Messages):
    def __init__(self, methods: Mapping[str, Method]) -> None:
        super().__init__()
        self._methods = methods
        self._running: set[asyncio.Task[None]] = set()

    def message_received(self, message: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._run(*pickle.loads(message)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        # The caller has ended, or it calls again through Ray.
        for task in list(self._running):
            task.cancel()

    async def _run(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value, raised, trace = None, None, ""
        try:
            value = await self._methods[method](*args, **kwargs)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  raised in the caller's process
            raised, trace = error, traceback.format_exc()
            # Of a further actor. Its class is made at run time, so it cannot be pickled.
            if isinstance(error, RayTaskError):
                raised, trace = error.cause, str(error)

        try:
            message = pickle.dumps((number, value, raised, trace), protocol=5)
        except Exception as error:  # noqa: BLE001  an object may fail to be pickled with any error
            cause = raised or error
            described = RuntimeError(f"{type(cause).__name__}: {cause}")
            message = pickle.dumps((number, None, described, trace or traceback.format_exc()), protocol=5)
        if self.transport is not None:
            self.send(message)


class DirectCalls:
    """The methods of an actor that other actors may call directly."""

    def __init__(self, **methods: Method) -> None:
        self._methods = methods
        self._serving: asyncio.Task[Address] | None = None

    async def address(self) -> Address:
        """Return where the methods can be called; they run on the event loop that asked first."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name="take direct calls")
        return await self._serving

    async def _serve(self) -> Address:
        name = f"\0async-pipeline-{os.getpid()}-{secrets.token_hex(16)}"
        address = Address(_host(), name, tuple(self._methods))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(address.name)
        # It serves until the process ends.
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Callee(self._methods), sock=listening
        )
        return address


class _Caller(_Messages):
    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[tuple[Any, ...]]] = {}

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return the reply to a call, or None if its arguments cannot be sent as one message."""
        number = next(self._numbers)
        try:
            message = pickle.dumps((number, method, args, kwargs), protocol=5)
        except Exception:  # noqa: BLE001  Ray's pickler knows more types
            return None
        if len(message) > LARGEST_BYTES:
            return None

        waiting: asyncio.Future[tuple[Any, ...]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self.send(message)
            return await waiting
        finally:
            self._waiting.pop(number, None)

    def message_received(self, message: bytes) -> None:
        number, *reply = pickle.loads(message)
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(tuple(reply))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    ConnectionLost(f"the connection to an actor ended: {error or 'closed'}")
                )


class DirectCaller:
    """Calls one actor from one event loop: over a socket if possible, else through Ray."""

    def __init__(self, handle: Any) -> None:
        """`handle`: of an actor whose method `direct_address` returns `DirectCalls.address`, or of any other
        actor, whose calls then go through Ray.
        """
        self._handle = handle
        self._connection: _Caller | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._methods: tuple[str, ...] = ()
        """The methods that can be called over the connection."""
        self._through_ray_until = -1.0

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `handle.method.remote(...)`.

        Raises the errors that Ray would raise, and ConnectionLost; the next calls then go through Ray, which
        knows whether the actor is dead. So do calls with references, which Ray counts and resolves.
        """
        if any(isinstance(one, ObjectRef) for one in args):
            return await getattr(self._handle, method).remote(*args, **kwargs)
        connection = self._connection
        if connection is None or not connection.is_open:
            connection = await self._connected()
        reply = None
        if connection is not None and method in self._methods:
            try:
                reply = await connection.call(method, args, kwargs)
            except ConnectionLost:
                self._through_ray_until = asyncio.get_running_loop().time() + RETRY_S
                raise
        if reply is None:
            return await getattr(self._handle, method).remote(*args, **kwargs)
        return _result(method, *reply)

    async def _connected(self) -> _Caller | None:
        if self._connecting is None:
            if asyncio.get_running_loop().time() < self._through_ray_until:
                return None
            self._connecting = asyncio.create_task(self._connect(), name="connect to an actor")
        await asyncio.shield(self._connecting)
        return self._connection if self._connection is not None and self._connection.is_open else None

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._connection, self._through_ray_until = None, loop.time() + RETRY_S
        try:
            asked = self._handle.direct_address.remote()
            address = await within(asked, ASK_S, owner="a caller", what="an actor to tell its address")
            if address.host == _host():
                self._connection, self._methods = await _connection_to(address), address.methods
        except Exception as error:  # noqa: BLE001  the call goes through Ray, which reports a broken actor
            logger.debug("no direct calls: %s", error)
        finally:
            self._connecting = None


async def _connection_to(address: Address) -> _Caller:
    loop = asyncio.get_running_loop()
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        await loop.sock_connect(connected, address.name)
        _, caller = await loop.create_unix_connection(_Caller, sock=connected)
    except BaseException:
        connected.close()
        raise
    return caller


def _result(method: str, value: Any, error: BaseException | None, trace: str) -> Any:
    if error is None:
        return value
    if isinstance(error, asyncio.CancelledError):
        raise TaskCancelledError
    raise RayTaskError(method, trace, error).as_instanceof_cause()


class DirectActors:
    """Actors by name, with handles whose `method.remote(...)` calls directly."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._known: dict[str, tuple[Any, Any]] = {}

    def of(self, name: str, handle: Any) -> Any:
        """Return the handle to call: the same one as long as the actor of this name is the same."""
        known = self._known.get(name)
        if known is None or known[0] != handle:
            call = partial(DirectCaller(handle).call, self._method)
            known = self._known[name] = (
                handle,
                SimpleNamespace(**{self._method: SimpleNamespace(remote=call)}),
            )
        return known[1]
