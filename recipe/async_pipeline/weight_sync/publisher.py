# SPDX-License-Identifier: Apache-2.0
"""Brings each version to all its consumers, one after another; one that fails is fenced, and comes back.

A consumer is whatever computes with published weights: a rollout replica, later a pool for log-probs. It
serves, or it is fenced: then it gets no work, is started anew beside the run, loads the version that is
current by then, and serves again. The trainer takes no part in that: the newest version stays in host memory
until the one after it is served everywhere. Where nobody is left, a publication waits for the first to
return.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from ..core.clock import within
from ..core.items import LoadReport
from ..core.wait_graph import Holders
from ..errors import WeightSyncError
from .manifest import Ticket

ASK_S = 60.0
"""For the balancer to take a consumer out of the rotation, or back in."""
GRACE_S = 30.0
"""A consumer's own deadline fires first, so that its message, which knows more, is the one shown."""
ATTEMPTS = 3
"""A consumer that could not come back this many times in a row stays away."""
BACK_OFF_S = 1.0
"""Before a consumer's second attempt, or its second fall within `MEMORY_S`; twice that before the next,
and so on.
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
    """Whatever computes with published weights."""

    name: str

    async def load(self, ticket: Ticket) -> LoadReport:
        """Check, load and prove one version, and serve it from then on."""

    async def leave(self) -> None:
        """Get no more work. Called when it has failed, so it must work without the consumer's help."""

    async def restart(self) -> None:
        """Begin anew, with no weights yet; what is left of the old one is ended first."""

    async def join(self) -> None:
        """Get work again."""

    async def check(self) -> None:
        """Return if it works. Raises what it died of; one that is stuck does not return."""


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
        at_once: int = 1,
        note: Callable[[str, str, int | None], None] = lambda event, name, version: None,
    ) -> None:
        """`wait_timeout_s`: for the weights, while somebody else has them. `at_once`: so many consumers load
        at the
        same time, and the others work meanwhile. `say` gets one line for the user, whenever a
        consumer leaves, fails to come back or comes back; `note` the event, FENCED, ABSENT or REJOINED, the
        consumer's
        name and the version that it serves.
        """
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
        self._at_once = at_once
        self._say, self._note = say, note
        self._newest: Ticket | None = None
        self._begun = False
        """A version was served: from then on, whatever fails has worked before."""
        self._returning: dict[str, asyncio.Task[LoadReport | None]] = {}
        self._falls: dict[str, list[float]] = {}
        """When each consumer was fenced, of late."""
        self._last_error: Exception | None = None

    async def publish(self, ticket: Ticket) -> Outcome:
        """Have every consumer that serves load a version. One that fails is fenced, and the others go on.

        Waits for: the loads; if nobody is left, the first that comes back. Raises what the last of them
        raised, or
        WaitTimeout naming who did not answer: it is the first version of all, or none can come back.
        WeightSyncError:
        the version is not newer than the last.
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
                    if consumer not in self.serving:  # fenced meanwhile
                        continue
                    try:
                        reports.append(await self._load(consumer, ticket))
                    except Exception as error:  # noqa: BLE001  whatever it is, the others go on
                        failed.append((consumer, error))

            await asyncio.gather(*(lane() for _ in range(self._at_once)))
            if failed and not reports and not self._begun:
                raise failed[-1][1]
            for consumer, error in failed:
                await self._fence(consumer, error)
        reports = reports or [await self._first_back()]
        self._begun = True
        return Outcome(reports, {name: why for name, why in self.fenced.items() if name not in before})

    async def watch(self, every_s: float = CHECK_EVERY_S) -> None:
        """Fence whoever stops working between two publications. Never returns.

        Raises what the last consumer died of: none is left, and none comes back. WaitTimeout: the balancer
        does not answer.
        """
        while True:
            await asyncio.sleep(every_s)
            if self._begun:
                await asyncio.gather(*(self._look_after(consumer) for consumer in list(self.serving)))
                self._check_somebody_is_left()

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

    async def _load(self, consumer: Consumer, ticket: Ticket) -> LoadReport:
        report = await within(
            consumer.load(ticket),
            self._load_timeout_s,
            owner="param_update",
            what=f"{consumer.name} to load version {ticket.version}",
            holder=lambda: f"{consumer.name} does not answer",
        )
        self.versions[consumer.name] = ticket.version
        return report

    async def _look_after(self, consumer: Consumer) -> None:
        try:
            await within(
                consumer.check(),
                self._load_timeout_s,
                owner="the pipeline",
                what=f"{consumer.name} to say that it works",
                holder=lambda: f"{consumer.name} does not answer",
            )
        except Exception as error:  # noqa: BLE001  whatever it is, the others go on
            await self._fence(consumer, error)

    async def _fence(self, consumer: Consumer, error: Exception) -> None:
        """Give a consumer no more work, and begin to bring it back. One that is fenced already is left
        alone.
        """
        if consumer not in self.serving:
            return
        self.serving.remove(consumer)
        self.versions.pop(consumer.name, None)
        self._failed(consumer, "FENCED", error)
        self._say(
            f"{consumer.name} is fenced and starts anew; {len(self.serving)} go on. "
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
            what=f"the balancer to give {consumer.name} no more work",
        )

    def _failed(self, consumer: Consumer, event: str, error: Exception) -> None:
        self._last_error = error
        self.fenced[consumer.name] = _in_words(error)
        self._note(event, consumer.name, None)

    async def _return(self, consumer: Consumer) -> LoadReport | None:
        """Bring a consumer back; None: it stays away."""
        falls = len(self._falls[consumer.name])
        try:
            for attempt in range(1, ATTEMPTS + 1):
                await asyncio.sleep(_back_off_s(falls + attempt - 1))
                try:
                    version, report = await self._start_anew(consumer)
                except Exception as error:  # noqa: BLE001  whatever it is, the others go on
                    self._failed(consumer, "ABSENT", error)
                    self._say(
                        f"{consumer.name} did not come back (attempt {attempt} of {ATTEMPTS}). "
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

    async def _start_anew(self, consumer: Consumer) -> tuple[int, LoadReport]:
        await within(
            consumer.restart(),
            self._restart_timeout_s,
            owner="param_update",
            what=f"{consumer.name} to start anew",
        )
        async with self.weights(consumer.name):
            assert self._newest is not None, "nobody is fenced before the first publication"
            ticket = self._newest
            report = await self._load(consumer, ticket)
            await within(consumer.join(), ASK_S, owner=consumer.name, what="the balancer to give it work")
            self.serving.append(consumer)
            del self.fenced[consumer.name]
        return ticket.version, report

    async def _first_back(self) -> LoadReport:
        """What the newest version cost the first consumer that serves it after all were fenced."""
        while True:
            self._check_somebody_is_left()
            waiting = asyncio.wait(self._returning.values(), return_when=asyncio.FIRST_COMPLETED)
            # Each attempt has deadlines of its own.
            done, _ = await within(
                waiting, None, owner="param_update", what="a replica to come back", holder=self._away
            )
            reports = [task.result() for task in done]
            for report in reports:
                if report is not None:
                    return report

    def _away(self) -> str:
        return "; ".join(f"{name} is away: {why}" for name, why in self.fenced.items())

    def _check_somebody_is_left(self) -> None:
        if not self.serving and not self._returning and self._last_error is not None:
            raise self._last_error


def _in_words(error: Exception) -> str:
    """Kind and message. vLLM's errors say the same twice, on one line each time."""
    text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0]}"


def _back_off_s(failures: int) -> float:
    """Seconds before a consumer is started anew that has failed so many times."""
    return 0.0 if failures < 2 else min(BACK_OFF_S * 2.0 ** (failures - 2), LONGEST_BACK_OFF_S)
