# SPDX-License-Identifier: Apache-2.0
"""Bring each version to all its consumers in turn; fence a consumer that fails, and bring it back.

A consumer computes with published weights: a rollout replica, later a pool for log-probs. It either
serves or is fenced. A fenced consumer gets no work, is restarted in the background, loads the version
that is current by then, and serves again. The trainer is not involved: the newest version stays in host
memory until every consumer serves the next one. If no consumer is left, an update waits for the first to
return.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from ..core.deadline import within
from ..core.items import LoadReport
from ..core.wait_graph import Holders
from ..errors import WeightSyncError
from .manifest import Ticket

ASK_S = 60.0
"""Deadline for the balancer to take a consumer out of the rotation, or back in."""
GRACE_S = 30.0
"""Added to deadlines here, so that the consumer's own deadline fires first: its message is more precise."""
ATTEMPTS = 3
"""A consumer that failed to return this many times in a row stays away."""
BACK_OFF_S = 1.0
"""Delay before a consumer's second attempt, or after its second failure within `MEMORY_S`; it doubles
each time.
"""
LONGEST_BACK_OFF_S = 60.0
MEMORY_S = 600.0
CHECK_EVERY_S = 2.0


class Outcome(NamedTuple):
    """The result of one weight update."""

    reports: list[LoadReport]
    """One for each consumer that loaded the version."""
    failures: Mapping[str, str]
    """Consumers that were fenced during the update and do not serve at its end, with the reason."""


class Consumer(Protocol):
    """A process group that computes with published weights."""

    name: str

    async def load(self, ticket: Ticket) -> LoadReport:
        """Check, load and verify one version, and serve it afterwards."""

    async def leave(self) -> None:
        """Get no more work. Called after a failure, so it must work without the consumer's help."""

    async def restart(self) -> None:
        """Start again without weights, after ending what is left of the old process."""

    async def join(self) -> None:
        """Get work again."""

    async def check(self) -> None:
        """Return if the consumer works; raise the error that it died of. If it is stuck, this never
        returns.
        """


class Distribution:
    """Which consumers serve, and the loads and restarts that keep it so."""

    def __init__(
        self,
        consumers: Sequence[Consumer],
        say: Callable[[str], None],
        *,
        load_timeout_s: float,
        restart_timeout_s: float,
        grace_s: float = GRACE_S,
        wait_timeout_s: float | None = None,
        max_concurrent_loads: int = 1,
        note: Callable[[str, str, int | None], None] = lambda event, name, version: None,
    ) -> None:
        """Set the deadlines, and who is notified.

        `wait_timeout_s` bounds the wait for weights that another task holds. `max_concurrent_loads`
        consumers load at the same time while the others work. `say` gets one line for the user whenever a
        consumer is fenced, fails to return or returns; `note` gets the event (FENCED, ABSENT or
        REJOINED), the consumer's name and the version that it serves.
        """
        self.serving = list(consumers)
        self.fenced: dict[str, str] = {}
        """Why each fenced consumer does not serve, by name."""
        self.versions: dict[str, int] = {}
        """The version that each serving consumer serves, by name."""

        self._weights = asyncio.Lock()
        self._holder = ""
        """The task that holds the weights."""
        self._load_timeout_s = load_timeout_s + grace_s
        self._restart_timeout_s = restart_timeout_s
        self._wait_timeout_s = wait_timeout_s
        self._max_concurrent_loads = max_concurrent_loads
        self._say, self._note = say, note

        self._newest: Ticket | None = None
        self._begun = False
        """A version was served, so a later failure is not a configuration error."""
        self._returning: dict[str, asyncio.Task[LoadReport | None]] = {}
        self._falls: dict[str, list[float]] = {}
        """When each consumer was fenced, within the last `MEMORY_S`."""
        self._last_error: Exception | None = None

    async def publish(self, ticket: Ticket) -> Outcome:
        """Have every serving consumer load a version. Fence any that fails, and continue with the
        others.

        Waits for: the loads; if every consumer failed, the first one that returns. Raises the last
        consumer's error, or WaitTimeout naming the consumer that did not respond, if this is the first
        version of the run or no consumer can return. Raises WeightSyncError if the version is not newer
        than the last.
        """
        before = set(self.fenced)
        reports: list[LoadReport] = []
        failed: list[tuple[Consumer, Exception]] = []
        async with self.weights("param_update"):
            if self._newest is not None and ticket.version <= self._newest.version:
                raise WeightSyncError(
                    f"v{ticket.version} offered after v{self._newest.version}; versions only move forward"
                )
            self._newest = ticket
            turns = iter(list(self.serving))

            async def lane() -> None:
                for consumer in turns:
                    if consumer not in self.serving:  # fenced in the meantime
                        continue
                    try:
                        reports.append(await self._load(consumer, ticket))
                    except Exception as error:  # noqa: BLE001  the other consumers continue after any error
                        failed.append((consumer, error))

            await asyncio.gather(*(lane() for _ in range(self._max_concurrent_loads)))
            if failed and not reports and not self._begun:
                raise failed[-1][1]
            for consumer, error in failed:
                await self._fence(consumer, error)
        reports = reports or [await self._first_back()]
        self._begun = True
        return Outcome(reports, {name: why for name, why in self.fenced.items() if name not in before})

    async def watch(self, every_s: float = CHECK_EVERY_S) -> None:
        """Fence consumers that stop working between two updates. Never returns.

        Raises the last consumer's error if none is left and none returns, or WaitTimeout if the balancer
        does not respond.
        """
        while True:
            await asyncio.sleep(every_s)
            if self._begun:
                await asyncio.gather(*(self._look_after(consumer) for consumer in list(self.serving)))
                self._require_a_consumer()

    @asynccontextmanager
    async def weights(self, owner: str) -> AsyncIterator[None]:
        """Hold the weights: no consumer changes version until this is left.

        Waits for: the current holder. Raises WaitTimeout naming it.
        """
        await within(
            self._weights.acquire(),
            self._wait_timeout_s,
            owner=owner,
            what="the replicas' weights",
            holder=lambda: Holders(f"{self._holder} has them", [self._holder]),
        )
        self._holder = owner
        try:
            yield
        finally:
            self._weights.release()

    async def close(self) -> None:
        """Cancel all pending restarts."""
        tasks = list(self._returning.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, consumer: Consumer, ticket: Ticket) -> LoadReport:
        report = await within(
            consumer.load(ticket),
            self._load_timeout_s,
            owner="param_update",
            what=f"{consumer.name} to load version {ticket.version}",
            holder=lambda: f"{consumer.name} does not respond",
        )
        self.versions[consumer.name] = ticket.version
        return report

    async def _look_after(self, consumer: Consumer) -> None:
        try:
            await within(
                consumer.check(),
                self._load_timeout_s,
                owner="the pipeline",
                what=f"{consumer.name} to respond to a check",
                holder=lambda: f"{consumer.name} does not respond",
            )
        except Exception as error:  # noqa: BLE001  the other consumers continue after any error
            await self._fence(consumer, error)

    async def _fence(self, consumer: Consumer, error: Exception) -> None:
        """Give a consumer no more work and start to bring it back. Does nothing if it is fenced already."""
        if consumer not in self.serving:
            return
        self.serving.remove(consumer)
        self.versions.pop(consumer.name, None)
        self._failed(consumer, "FENCED", error)
        self._say(
            f"{consumer.name} is fenced and restarts; {len(self.serving)} still serve. "
            f"{self.fenced[consumer.name]}"
        )

        now = asyncio.get_running_loop().time()
        self._falls[consumer.name] = [
            *(at for at in self._falls.get(consumer.name, ()) if now - at < MEMORY_S),
            now,
        ]

        self._returning[consumer.name] = asyncio.create_task(
            self._return(consumer), name=f"return:{consumer.name}"
        )

        await within(
            consumer.leave(),
            ASK_S,
            owner="param_update",
            what=f"the balancer to remove {consumer.name}",
        )

    def _failed(self, consumer: Consumer, event: str, error: Exception) -> None:
        self._last_error = error
        self.fenced[consumer.name] = _in_words(error)
        self._note(event, consumer.name, None)

    async def _return(self, consumer: Consumer) -> LoadReport | None:
        """Bring a consumer back; return None if it stays away."""
        falls = len(self._falls[consumer.name])
        try:
            for attempt in range(1, ATTEMPTS + 1):
                await asyncio.sleep(_back_off_s(falls + attempt - 1))
                try:
                    version, report = await self._restart(consumer)
                except Exception as error:  # noqa: BLE001  the other consumers continue after any error
                    self._failed(consumer, "ABSENT", error)
                    self._say(
                        f"{consumer.name} did not return (attempt {attempt} of {ATTEMPTS}). "
                        f"{self.fenced[consumer.name]}"
                    )
                else:
                    self._note("REJOINED", consumer.name, version)
                    self._say(f"{consumer.name} serves again, version {version}")
                    return report
            return None
        finally:
            if self._returning.get(consumer.name) is asyncio.current_task():
                del self._returning[consumer.name]

    async def _restart(self, consumer: Consumer) -> tuple[int, LoadReport]:
        await within(
            consumer.restart(),
            self._restart_timeout_s,
            owner="param_update",
            what=f"{consumer.name} to restart",
        )
        async with self.weights(consumer.name):
            assert self._newest is not None, "no consumer is fenced before the first update"
            ticket = self._newest
            report = await self._load(consumer, ticket)
            await within(consumer.join(), ASK_S, owner=consumer.name, what="the balancer to add it")
            self.serving.append(consumer)
            del self.fenced[consumer.name]
        return ticket.version, report

    async def _first_back(self) -> LoadReport:
        """Wait for the first consumer to serve the newest version after all were fenced; return its
        report.
        """
        while True:
            self._require_a_consumer()
            waiting = asyncio.wait(self._returning.values(), return_when=asyncio.FIRST_COMPLETED)
            # No deadline here: each attempt has its own.
            done, _ = await within(
                waiting, None, owner="param_update", what="a replica to come back", holder=self._away
            )
            reports = [task.result() for task in done]
            for report in reports:
                if report is not None:
                    return report

    def _away(self) -> str:
        return "; ".join(f"{name} is away: {why}" for name, why in self.fenced.items())

    def _require_a_consumer(self) -> None:
        if not self.serving and not self._returning and self._last_error is not None:
            raise self._last_error


def _in_words(error: Exception) -> str:
    """Return kind and message. vLLM's errors repeat themselves on further lines."""
    text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0]}"


def _back_off_s(failures: int) -> float:
    """Return the delay before restarting a consumer that has failed this many times."""
    return 0.0 if failures < 2 else min(BACK_OFF_S * 2.0 ** (failures - 2), LONGEST_BACK_OFF_S)
