# SPDX-License-Identifier: Apache-2.0
"""A direct call has the result and the errors of a call through Ray, which replaces it where it fails."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import ObjectRef
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError

from recipe.async_pipeline.agents.processes.commands import run_command
from recipe.async_pipeline.agents.processes.sandbox import Sandbox, reason_without
from recipe.async_pipeline.verl_bridge.calls import direct_calls
from recipe.async_pipeline.verl_bridge.calls.direct_calls import (
    Address,
    ConnectionLost,
    DirectActors,
    DirectCaller,
    DirectCalls,
)
from tests import HANG_S


class Actor:
    """An actor in this process. Its methods run directly, or through this stand-in for Ray."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()
        self.served = DirectCalls(
            echo=self.echo, fail=self.fail, refuse=self.refuse, hang=self.hang, odd=self.odd
        )

    async def echo(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("direct")
        return args, kwargs

    async def fail(self) -> None:
        raise ValueError("a bad prompt")

    async def refuse(self) -> None:
        # As a further actor's error arrives here, called directly or through Ray.
        raise RayTaskError("generate", "the further trace", ValueError("a bad prompt")).as_instanceof_cause()

    async def odd(self) -> Any:
        return lambda: None

    async def hang(self) -> None:
        self.started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled.set()


class Handle:
    """Ray's handle of an actor; calls to it are recorded."""

    def __init__(self, actor: Actor, address: Callable[[], Awaitable[Address]] | None = None) -> None:
        self.through_ray: list[str] = []
        self._actor = actor
        self.direct_address = SimpleNamespace(remote=address or actor.served.address)

    def __getattr__(self, name: str) -> Any:
        async def remote(*args: Any, **kwargs: Any) -> Any:
            self.through_ray.append(name)
            return await getattr(self._actor, name)(*args, **kwargs)

        return SimpleNamespace(remote=remote)


class Sockets:
    """What the event loop of a story has opened."""

    def __init__(self, loop: Any) -> None:
        self.connections: list[Any] = []
        """The callers' ends, in their order."""
        self.servers: list[Any] = []
        connect, serve = loop.create_unix_connection, loop.create_unix_server

        async def connected(*args: Any, **kwargs: Any) -> Any:
            made = await connect(*args, **kwargs)
            self.connections.append(made[0])
            return made

        async def serving(*args: Any, **kwargs: Any) -> Any:
            self.servers.append(await serve(*args, **kwargs))
            return self.servers[-1]

        loop.create_unix_connection, loop.create_unix_server = connected, serving

    def close(self) -> None:
        for connection in self.connections:
            connection.abort()
        for server in self.servers:
            server.close()


Story = Callable[[Actor, Handle, DirectCaller], Awaitable[None]]


def with_actor(story: Story) -> None:
    with_sockets(lambda actor, handle, caller, sockets: story(actor, handle, caller))


def with_sockets(story: Callable[[Actor, Handle, DirectCaller, Sockets], Awaitable[None]]) -> None:
    async def run() -> None:
        actor = Actor()
        handle, sockets = Handle(actor), Sockets(asyncio.get_running_loop())
        await story(actor, handle, DirectCaller(handle), sockets)
        sockets.close()
        # The other end closes as soon as the event loop has read the end of the stream.
        for _ in range(50):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_call_returns_the_result() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        many = [caller.call("echo", number, key="x" * 100_000) for number in range(20)]
        assert await asyncio.gather(*many) == [((n,), {"key": "x" * 100_000}) for n in range(20)]
        assert not handle.through_ray

    with_actor(story)


def test_a_call_with_a_reference_goes_through_ray() -> None:
    """A reference that is sent over a socket keeps its object for as long as its owner lives."""

    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        reference = ObjectRef(bytes(28), skip_adding_local_ref=True)
        assert await caller.call("echo", 1, reference) == ((1, reference), {})
        assert handle.through_ray == ["echo"]

    with_actor(story)


def test_an_error_is_the_one_that_ray_would_raise() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        with pytest.raises(ValueError, match="a bad prompt") as raised:
            await caller.call("fail")
        assert isinstance(raised.value, RayTaskError)
        assert isinstance(raised.value.cause, ValueError)
        assert "in fail" in str(raised.value)
        assert await caller.call("echo") == ((), {}), "the connection stays usable"

    with_actor(story)


def test_an_error_of_a_further_actor_keeps_its_cause() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        with pytest.raises(ValueError, match="the further trace") as raised:
            await caller.call("refuse")
        assert isinstance(raised.value, RayTaskError)
        assert repr(raised.value.cause) == "ValueError('a bad prompt')"

    with_actor(story)


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_call() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        with pytest.raises(RayTaskError, match=r"pickle"):
            await caller.call("odd")

    with_actor(story)


@pytest.mark.parametrize("large", [True, False])
def test_arguments_that_are_too_large_or_cannot_be_pickled_go_through_ray(large: bool) -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        argument = bytes(direct_calls.LARGEST_BYTES + 1) if large else lambda: None
        assert await caller.call("echo", argument) == ((argument,), {})
        assert handle.through_ray == ["echo"]

    with_actor(story)


def test_a_method_that_takes_no_direct_calls_is_called_through_ray() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        actor.served = DirectCalls(fail=actor.fail)
        handle.direct_address = SimpleNamespace(remote=actor.served.address)
        assert await caller.call("echo", 1) == ((1,), {})
        assert handle.through_ray == ["echo"]
        with pytest.raises(ValueError, match="a bad prompt"):
            await caller.call("fail")
        assert handle.through_ray == ["echo"]

    with_actor(story)


@pytest.mark.parametrize("why", ["other host", "no such method", "dead", "nothing listens"])
def test_without_a_connection_calls_go_through_ray(why: str) -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        asked = 0

        async def address() -> Address:
            nonlocal asked
            asked += 1
            if why == "no such method":
                raise AttributeError(why)
            if why == "dead":
                raise ActorDiedError
            here = await actor.served.address()
            return Address("elsewhere" if why == "other host" else here.host, "\0nothing", ("echo",))

        handle = Handle(actor, address)
        caller = DirectCaller(handle)
        for _ in range(3):
            assert await caller.call("echo", 1) == ((1,), {})
        assert handle.through_ray == ["echo"] * 3
        assert asked == 1, "the next attempt is only made after a while"

    with_actor(story)


def test_after_a_lost_connection_the_next_calls_go_through_ray() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller, sockets: Sockets) -> None:
        call = asyncio.create_task(caller.call("hang"))
        await actor.started.wait()
        sockets.connections[0].abort()
        with pytest.raises(ConnectionLost):
            await call
        await actor.cancelled.wait()
        assert await caller.call("echo") == ((), {})
        assert handle.through_ray == ["echo"]

    with_sockets(story)


def test_a_method_that_is_cancelled_by_its_actor_is_cancelled_for_ray_too() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        call = asyncio.create_task(caller.call("hang"))
        await actor.started.wait()
        for task in asyncio.all_tasks():
            if "_Callee._run" in repr(task):
                task.cancel()
        with pytest.raises(TaskCancelledError):
            await call

    with_actor(story)


def test_a_caller_that_stops_waiting_ignores_the_reply() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        call = asyncio.create_task(caller.call("hang"))
        await actor.started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await caller.call("echo", 2) == ((2,), {})
        assert not handle.through_ray, "the connection stays usable"

    with_actor(story)


def test_a_peer_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        assert await caller.call("echo") == ((), {})
        assert handle.through_ray == ["echo"]

    with_actor(story)


ATTACK = (
    "import pickle, socket, struct, sys; message = pickle.dumps((1, 'echo', (), {})); "
    "peer = socket.socket(socket.AF_UNIX); peer.connect('\\0' + sys.argv[1]); "
    "peer.sendall(struct.pack('!Q', len(message)) + message); peer.recv(1); print('answered')"
)


@pytest.mark.skipif(bool(reason_without()), reason=f"no sandbox: {reason_without()}")
def test_an_agent_in_a_sandbox_cannot_send_pickles(tmp_path: Path) -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        name = (await actor.served.address()).name.removeprefix("\0")
        command = [sys.executable, "-I", "-c", ATTACK, name]
        for sandbox, calls in ((None, ["direct"]), (Sandbox.of(()), [])):
            actor.calls.clear()
            mounts = None if sandbox is None else sandbox.mounts(command, [tmp_path])
            finished = await run_command(command, tmp_path, {}, mounts=mounts)
            assert actor.calls == calls, finished

    with_actor(story)


def test_the_handle_of_a_name_changes_only_with_its_actor() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        actors, other = DirectActors("echo"), Handle(actor)
        first = actors.of("a", handle)
        assert actors.of("a", handle) is first
        assert actors.of("a", other) is not first

    with_actor(story)


def test_messages_of_one_turn_of_the_loop_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller, sockets: Sockets) -> None:
        await caller.call("echo")
        writes: list[bytes] = []
        connection = sockets.connections[0]
        plain = connection.write

        def write(data: bytes) -> None:
            writes.append(data)
            plain(data)

        monkeypatch.setattr(connection, "write", write)
        found = await asyncio.gather(*(caller.call("echo", n) for n in range(5)))
        assert found == [((n,), {}) for n in range(5)]
        assert len(writes) == 1
        assert not handle.through_ray

    with_sockets(story)


def test_calls_wait_while_the_connection_is_made() -> None:
    async def story(actor: Actor, handle: Handle, caller: DirectCaller) -> None:
        asked, may_tell = asyncio.Event(), asyncio.Event()

        async def address() -> Address:
            asked.set()
            await may_tell.wait()
            return await actor.served.address()

        handle.direct_address = SimpleNamespace(remote=address)
        first = asyncio.create_task(caller.call("echo", 1))
        await asked.wait()
        second = asyncio.create_task(caller.call("echo", 2))
        await asyncio.sleep(0)
        may_tell.set()
        assert (await first, await second) == (((1,), {}), ((2,), {}))
        assert not handle.through_ray

    with_actor(story)
