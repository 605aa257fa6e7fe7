# SPDX-License-Identifier: Apache-2.0
"""Brings each version to all its consumers, one after another; one that fails is fenced, and comes back.

A consumer is whatever computes with published weights: a rollout replica, later a pool for log-probs. It
serves, or it is fenced: then it gets no work, is started anew beside the run, loads the version that is
current by then, and serves again. The trainer takes no part in that: the newest version stays in host memory
until the one after it is served everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from ..core.clock import within
from ..core.waits import Holders
from ..errors import WeightSyncError

ASK_S = 60.0
"""For the balancer to take a consumer out of the rotation, or back in."""
GRACE_S = 30.0
"""A consumer's own deadline fires first, so that its message, which knows more, is the one shown."""
ATTEMPTS = 3
"""A consumer that could not come back this many times in a row stays away."""


class LoadReport(NamedTuple):
    """What one load cost one consumer, in seconds."""

    transfer_s: float
    """Until the version lay in memory of the consumer's host, checked."""
    load_s: float
    """From there until it was served."""
    stall_s: float
    """The part of `load_s` in which the consumer stood still."""
    prove_s: float
    """Part of `stall_s`."""
    busy_s: float
    """In which requests were open since the consumer's last load."""
    tensors_proved: int
    tokens_read_again: int


class Consumer(Protocol):
    """Whatever computes with published weights."""

    name: str

    async def load(self, ticket: bytes) -> LoadReport:
        """Check, load and prove one version, and serve it from then on."""

    async def leave(self) -> None:
        """Get no more work. Called when it has failed, so it must work without the consumer's help."""

    async def restart(self) -> None:
        """Begin anew, with no weights yet; what is left of the old one is ended first."""

    async def join(self) -> None:
        """Get work again."""


class Distribution:
    """Which consumers serve, and the loads and returns that keep it so."""

    def __init__(
        self,
        consumers: Sequence[Consumer],
        say: Callable[[str], None],
        *,
        load_timeout_s: float,
        restart_timeout_s: float,
        grace_s: float = GRACE_S,
        wait_timeout_s: float | None = None,
    ) -> None:
        """`wait_timeout_s`: for the weights, while somebody else has them. `say` gets one line for the user, whenever a consumer leaves, fails to come back or comes back."""
        self.serving = list(consumers)
        self.fenced: dict[str, str] = {}
        """Why each consumer that does not serve does not, by name."""
        self.versions: dict[str, int] = {}
        """What each consumer that serves serves, by name."""
        self._weights = asyncio.Lock()
        self._holder = ""
        """Who has it."""
        self._load_timeout_s = load_timeout_s + grace_s
        self._restart_timeout_s = restart_timeout_s
        self._wait_timeout_s = wait_timeout_s
        self._say = say
        self._newest: tuple[int, bytes] | None = None
        self._returning: dict[str, asyncio.Task[None]] = {}

    async def publish(self, version: int, ticket: bytes) -> list[LoadReport]:
        """Have every consumer that serves load a version. One that fails is fenced, and the others go on.

        Raises what the last of them raised, or WaitTimeout naming who did not answer: nobody is left.
        WeightSyncError: the version is not newer than the last.
        """
        reports = []
        async with self.weights("param_update"):
            if self._newest is not None and version <= self._newest[0]:
                raise WeightSyncError(f"v{version} offered after v{self._newest[0]}; versions only move forward")
            self._newest = (version, ticket)
            for consumer in list(self.serving):
                try:
                    reports.append(await self._load(consumer, version, ticket))
                except Exception as error:
                    if len(self.serving) == 1:
                        raise
                    await self._fence(consumer, error)
        return reports

    @asynccontextmanager
    async def weights(self, owner: str) -> AsyncIterator[None]:
        """Held while consumers change version, and by whoever needs them not to.

        Waits for: whoever has it. Raises WaitTimeout, naming them.
        """
        await within(
            self._weights.acquire(),
            self._wait_timeout_s,
            owner=owner,
            what="the replicas' weights to stand still",
            holder=lambda: Holders(f"{self._holder} has them", [self._holder]),
        )
        self._holder = owner
        try:
            yield
        finally:
            self._weights.release()

    async def close(self) -> None:
        """Stop what is on its way back."""
        tasks = list(self._returning.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, consumer: Consumer, version: int, ticket: bytes) -> LoadReport:
        report = await within(
            consumer.load(ticket),
            self._load_timeout_s,
            owner="param_update",
            what=f"{consumer.name} to load version {version}",
            holder=lambda: f"{consumer.name} does not answer",
        )
        self.versions[consumer.name] = version
        return report

    async def _fence(self, consumer: Consumer, error: Exception) -> None:
        self.serving.remove(consumer)
        self.versions.pop(consumer.name, None)
        self.fenced[consumer.name] = reason = f"{type(error).__name__}: {error}"
        self._say(f"{consumer.name} is fenced and starts anew; {len(self.serving)} go on. {reason}")
        await within(consumer.leave(), ASK_S, owner="param_update", what=f"the balancer to give {consumer.name} no more work")
        self._returning[consumer.name] = asyncio.create_task(self._return(consumer), name=f"return:{consumer.name}")

    async def _return(self, consumer: Consumer) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await within(
                    consumer.restart(),
                    self._restart_timeout_s,
                    owner="param_update",
                    what=f"{consumer.name} to start anew",
                )
                async with self.weights(consumer.name):
                    assert self._newest is not None, "it was fenced at a publication"
                    version, ticket = self._newest
                    await self._load(consumer, version, ticket)
                    await within(consumer.join(), ASK_S, owner=consumer.name, what="the balancer to give it work")
                    self.serving.append(consumer)
                    del self.fenced[consumer.name]
            except Exception as error:  # noqa: BLE001  whatever it is, the others go on
                self.fenced[consumer.name] = reason = f"{type(error).__name__}: {error}"
                self._say(f"{consumer.name} did not come back (attempt {attempt} of {ATTEMPTS}). {reason}")
            else:
                self._say(f"{consumer.name} serves again, version {version}")
                return
