# SPDX-License-Identifier: Apache-2.0
"""A bounded pool of environments, each with a deadline for every call.

    episode(seed, task) ─► an idle environment, or a new one ─► reset ─► a turn to play ─► step, step, ...
                           at most `concurrency` episodes

An environment plays one episode after another; one that failed, or whose call was given up, is ended and
replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..core.waits.deadline import GRACE_S, within
from ..errors import EnvironmentFailed, WaitTimeout
from .env_hosts import HOSTS, EnvironmentHost
from .environment import EnvironmentSpec, Isolation, Observation, Step

T = TypeVar("T")


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
    """Belongs to one event loop."""

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
