# SPDX-License-Identifier: Apache-2.0
"""Where an environment runs, in the event loop, in a thread or in a process that can be killed, and its pool.

inline      no overhead; an environment that blocks or hangs stops every episode of the worker
thread      one that blocks stops itself only; one that hangs leaves its thread behind
process     one that hangs, crashes or calls exit() is killed with everything that it started
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from ..core.waits.deadline import GRACE_S, within
from ..core.waits.threads import in_thread_of, made_in_executor
from ..errors import EnvironmentFailed, WaitTimeout
from .environment import MESSAGE_BYTES, EnvironmentSpec, Isolation, Observation, Player, Step, of_json

T = TypeVar("T")
ENV_PROCESS = f"{__package__}.processes.env_process"
CLOSE_S = 5.0
"""Seconds that an environment gets to close itself."""


class EnvironmentHost(Protocol):
    """Runs one environment. At most one call at a time."""

    async def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        """Begin an episode. Raises EnvironmentFailed."""

    async def step(self, text: str) -> Step:
        """Answer a text. Raises EnvironmentFailed."""

    async def close(self) -> bool:
        """End the environment, also one that hangs. Returns whether nothing of it is left."""


class InlineHost:
    """Calls the environment in the event loop."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._player = Player(spec)

    async def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        return await self._call(self._player.reset(seed, task))

    async def step(self, text: str) -> Step:
        return await self._call(self._player.step(text))

    async def close(self) -> bool:
        try:
            await within(
                self._call(self._player.close()),
                CLOSE_S,
                owner="an agent loop worker",
                what="an environment to close",
                grace_s=GRACE_S,
            )
        except (EnvironmentFailed, WaitTimeout):
            return False
        return True

    async def _call(self, answering: Coroutine[Any, Any, T]) -> T:
        """Await it in a new task, which tells the caller's cancellation from the environment's own."""
        task = asyncio.ensure_future(answering)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        return task.result()


class ThreadHost:
    """Calls the environment in a thread, which has an event loop for environments with coroutines."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._player = Player(spec)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a hanging environment must not keep the worker's process from ending.
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()
        self._loop: asyncio.AbstractEventLoop

    async def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        found: Observation = await self._call(lambda: self._player.reset(seed, task))
        return found

    async def step(self, text: str) -> Step:
        found: Step = await self._call(lambda: self._player.step(text))
        return found

    async def close(self) -> bool:
        closing = asyncio.ensure_future(self._call(self._player.close))
        done, _ = await asyncio.wait({closing}, timeout=CLOSE_S)
        self._calls.put(None)
        closing.cancel()
        return bool(done) and not closing.cancelled() and closing.exception() is None

    async def _call(self, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await in_thread_of(self._calls.put, lambda: self._loop.run_until_complete(begin()))

    def _run(self) -> None:
        self._loop = asyncio.new_event_loop()
        while (call := self._calls.get()) is not None:
            call()
        self._loop.close()


class ProcessHost:
    """Calls the environment in a process; see `env_process`."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._guard: _Guard | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        if self._guard is None:
            await self._start()
        return of_json(await self._call({"call": "reset", "seed": seed, "task": dict(task)}))

    async def step(self, text: str) -> Step:
        observation, *rest = await self._call({"call": "step", "text": text})
        return Step(of_json(observation), *rest)

    async def close(self) -> bool:
        if self._guard is None:
            return True
        if self._writer is not None:
            self._writer.transport.abort()
        return await asyncio.get_running_loop().run_in_executor(None, self._guard.end)

    async def _start(self) -> None:
        self._guard = await made_in_executor(_Guard, _Guard.end)
        self._reader, self._writer = await asyncio.open_connection(
            sock=self._guard.control, limit=MESSAGE_BYTES
        )
        self._send(asdict(self._spec))

    async def _call(self, request: Mapping[str, Any]) -> Any:
        try:
            await self._send(request).drain()
            line = await self._reader.readline()
        except (OSError, ValueError) as error:  # ValueError: the answer is too long
            raise EnvironmentFailed(f"{request['call']}: no answer: {error}") from error
        if not line:
            raise EnvironmentFailed(f"{request['call']}: the environment's process died")
        answer = json.loads(line)
        if "error" in answer:
            raise EnvironmentFailed(answer["error"])
        return answer["result"]

    def _send(self, message: Mapping[str, Any]) -> asyncio.StreamWriter:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")
        return self._writer


class _Guard:
    """The guard of an environment's process, and what connects to both. Its methods block."""

    def __init__(self) -> None:
        """Start it. Raises OSError."""
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    ENV_PROCESS,
                    str(theirs.fileno()),
                    str(lifeline),
                ],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                # The modules that this process can import.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except BaseException:
            self.control.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def end(self) -> bool:
        """End it with the environment's process. Returns whether both have ended."""
        # The guard kills the player, however busy it is.
        os.close(self._lifeline)
        self.control.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return False
        return True


HOSTS: Mapping[Isolation, Callable[[EnvironmentSpec], EnvironmentHost]] = {
    "process": ProcessHost,
    "thread": ThreadHost,
    "inline": InlineHost,
}


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """Bounds of a pool."""

    isolation: Isolation = "process"
    concurrency: int = 64
    """Episodes that are played at the same time."""
    timeout_s: float = 60.0
    """Seconds for one reset, with the start of its environment, and for one step."""


class Game:
    """One episode in an environment."""

    def __init__(self, pool: EnvironmentPool, host: EnvironmentHost) -> None:
        self._pool, self._host = pool, host
        self.observation: Observation = ""
        """The first observation."""
        self.usable = True
        """Whether the environment can play another episode."""

    async def step(self, text: str) -> Step:
        """Return the environment's answer. Raises EnvironmentFailed, also if it takes too long."""
        return await self._call("step", self._host.step(text))

    async def begin(self, seed: int, task: Mapping[str, Any]) -> None:
        """Reset the environment. Raises as `step`. For the pool."""
        self.observation = await self._call("reset", self._host.reset(seed, task))

    async def _call(self, what: str, answering: Awaitable[T]) -> T:
        # A call that does not return leaves the environment in an unknown state.
        self.usable = False
        timeout_s = self._pool.limits.timeout_s
        try:
            answer = await within(
                answering, timeout_s, owner="an episode", what=f"its environment to {what}", grace_s=GRACE_S
            )
        except WaitTimeout:
            raise EnvironmentFailed(f"{what} took more than {timeout_s:g} s") from None
        self.usable = True
        return answer


class EnvironmentPool:
    """A bounded pool of environments of one event loop, each with a deadline for every call.

        episode(seed, task) ─► an idle environment, or a new one ─► reset ─► a turn to play ─► step, step, ...
                               at most `concurrency` episodes

    An environment plays one episode after another; one that failed, or whose call was given up, is ended and
    replaced.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        limits: PoolLimits,
        hosts: Mapping[Isolation, Callable[[EnvironmentSpec], EnvironmentHost]] = HOSTS,
    ) -> None:
        self.limits = limits
        self.left_behind = 0
        """Environments that could not be ended: threads that hang, for example."""
        self._told = 0
        self._spec, self._make = spec, hosts[limits.isolation]
        self._to_play = asyncio.Semaphore(limits.concurrency)
        self._idle: list[EnvironmentHost] = []
        self._ending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def episode(self, seed: int, task: Mapping[str, Any]) -> AsyncIterator[Game]:
        """Begin an episode and end it with the context. Waits for a turn to play, and for an environment.

        Raises EnvironmentFailed if the environment cannot be made or reset.
        """
        async with self._to_play:
            host = self._idle.pop() if self._idle else self._make(self._spec)
            game = Game(self, host)
            try:
                await game.begin(seed, task)
                yield game
            finally:
                if game.usable:
                    self._idle.append(host)
                else:
                    self._end(host)

    def newly_left(self) -> int:
        """Return how many environments could not be ended since the last call."""
        new, self._told = self.left_behind - self._told, self.left_behind
        return new

    async def close(self) -> None:
        """End all environments that play no episode, and wait until they have ended."""
        while self._idle:
            self._end(self._idle.pop())
        if self._ending:
            await asyncio.wait(set(self._ending))

    def _end(self, host: EnvironmentHost) -> None:
        # In the background: the episode need not wait for an environment that hangs.
        task = asyncio.create_task(self._ended(host), name="end an environment")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _ended(self, host: EnvironmentHost) -> None:
        self.left_behind += not await host.close()
