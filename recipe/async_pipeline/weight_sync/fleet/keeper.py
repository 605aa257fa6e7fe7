# SPDX-License-Identifier: Apache-2.0
"""Keep one consumer at the newest version: load it when it is behind, and restart it after a failure.

A keeper is a task. It pulls versions by itself, so it waits for no other consumer, except for a turn to
commit while it serves: all consumers prepare a version at once, but only some pause at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from ...core.groups.items import LoadReport
from ...core.waits.deadline import all_of, within
from ...core.waits.wait_queue import Broadcast, Turnstile
from ...errors import WaitTimeout, WeightSyncError
from ..memory.manifest import WeightTicket
from .preparation import Consumer
from .registry import HAS_REQUESTS, ConsumerEvent, ConsumerState, Registry


@dataclass(kw_only=True)
class Shared:
    """What the keepers of a run have in common."""

    registry: Registry
    load_timeout_s: float
    restart_timeout_s: float
    slots: Turnstile
    """Turns to commit while serving."""
    say: Callable[[str], None]
    note: Callable[[str, str, int | None], None]
    changed: Broadcast = field(default_factory=Broadcast)
    """Notified after each change of the registry."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a version was served, so a later failure is not a configuration error."""
    watched: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once consumers are to be checked."""
    ticket: WeightTicket | None = None
    """The newest version."""
    reports: list[LoadReport] = field(default_factory=list)
    """Loads of the newest version."""
    failures: dict[str, str] = field(default_factory=dict)
    """Consumers that failed since the newest version was offered, with the reason."""
    last_error: Exception | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time()


T = TypeVar("T")
ASK_S = 60.0
"""Deadline for the balancer to remove or add a consumer, and for a consumer's processes to end."""
ATTEMPTS = 3
"""A consumer that failed to return this many times in a row stays away."""
BACK_OFF_S = 1.0
"""Delay before a second attempt, or after a second failure within `MEMORY_S`; it doubles each time."""
LONGEST_BACK_OFF_S = 60.0
MEMORY_S = 600.0
CHECK_EVERY_S = 2.0
DRAIN_POLL_S = 1.0
"""Interval for counting the open requests of a consumer that leaves. Lists of consumers that were made before
it left the rotation may be this old.
"""


class Keeper:
    """Keeps one consumer at the newest version."""

    def __init__(self, consumer: Consumer, shared: Shared, *, started: bool) -> None:
        """`started`: its processes are up and it is in the balancer's list, as at the start of a run."""
        self.consumer, self.name = consumer, consumer.name
        self._shared, self._registry = shared, shared.registry
        state = ConsumerState.SERVING if started else ConsumerState.JOINING
        self.member = self._registry.add(consumer.name, state)
        self._listed, self._listing = started, asyncio.Lock()
        """Whether the balancer has it, and the turn to change that."""
        self.has_served = started
        """Otherwise it is new: a failure ends it, because it has never worked."""
        self._must_start = not started
        self._attempt = 0
        """Restarts since it failed; 0 while it has not failed."""
        self._falls: list[float] = []
        """When it was fenced, within the last `MEMORY_S`."""
        self._offered = asyncio.Event()
        self._given_up = asyncio.Event()
        self._why_given_up = ""

    @property
    def is_leaving_the_rotation(self) -> bool:
        """Whether the balancer still has it although it does not serve."""
        return self._listed and self.member.state is not ConsumerState.SERVING

    async def run(self) -> None:
        """Keep the consumer at the newest version. Returns if it stays away, or never worked.

        Raises WaitTimeout if the balancer does not respond.
        """
        if not self.has_served:
            self._shared.note("JOINING", self.name, None)
        while True:
            try:
                if self._must_start:
                    await self._start()
                await all_of(self._pull(), self._check(), self._until_given_up())
            except Exception as error:  # noqa: BLE001  the other consumers continue after any error
                if not await self._fail(error):
                    return

    def offer(self) -> None:
        """Have it look which version to load; after a version was offered or retired."""
        self._offered.set()

    async def fall_behind(self) -> None:
        """Take it out of the rotation until it has caught up; its open requests continue.

        Raises WaitTimeout if the balancer does not respond.
        """
        self._registry.fire(self.name, ConsumerEvent.LATE)
        self._shared.note("BEHIND", self.name, self.member.version)
        self._shared.say(
            f"{self.name} is too slow to load version {self.member.loading} and gets no new requests until "
            "it has"
        )
        self._shared.slots.wake()
        await self._out_of_the_rotation()

    async def depart(self, drain_s: float) -> None:
        """Have it finish its open requests, for at most `drain_s`, and end it; its state is LEAVING.

        Requests that are still open then are repeated by other consumers. 0: it has no requests. Not while
        `run` runs. Raises WaitTimeout if the balancer does not respond.
        """
        self._shared.note("LEAVING", self.name, self.member.version)
        self._shared.say(f"{self.name} gets no new requests and ends when its open ones are finished")
        self._shared.slots.wake()
        await self._out_of_the_rotation()
        if drain_s > 0:
            with suppress(Exception):  # a dead consumer has no requests
                await within(self._drained(), drain_s, owner="the pipeline", what=f"{self.name} to finish")
        await self._end_for_good("it was removed")

    def give_up(self, why: str) -> None:
        """Have it ended at once: fenced if it serves, without its requests if it leaves."""
        self._why_given_up = why
        self._given_up.set()

    # The parts of `run`.

    async def _start(self) -> None:
        """Start its processes, after ending what is left of them."""
        self._given_up.clear()
        if self._attempt:
            with suppress(Exception):  # the node may be lost
                await within(self.consumer.end(), ASK_S, owner="the pipeline", what=f"the end of {self.name}")
            self.member.reading = None
            self._shared.changed.notify()
            await asyncio.sleep(back_off_s(len(self._falls) + self._attempt - 1))
        await within(
            self.consumer.start(),
            self._shared.restart_timeout_s,
            owner="param_update",
            what=f"{self.name} to restart" if self._attempt else f"{self.name} to start",
        )
        self._must_start = False
        if self._attempt:
            self._registry.fire(self.name, ConsumerEvent.RESTART)

    async def _pull(self) -> None:
        """Load each version that is offered. Never returns; raises the error of a load."""
        while True:
            if self._registry.wanted(self.name) is None:
                self._offered.clear()
                await self._offered.wait()
                continue
            try:
                await self._load()
            finally:
                self._shared.slots.wake()
                self._shared.changed.notify()

    async def _load(self) -> None:
        ticket = self._shared.ticket
        assert ticket is not None
        version = self._registry.begin_prepare(self.name, self._shared.now())
        if not await self._prepare(ticket):
            self._registry.void_load(self.name)
            return

        self._registry.end_prepare(self.name, self._shared.now())
        if self.member.state is ConsumerState.SERVING:
            await self._shared.slots.turn(self.name)
        if self._registry.wanted(self.name) != version:
            self._registry.void_load(self.name)
            return

        # No await since the turn.
        self._registry.begin_commit(self.name, self._shared.now())
        report = await self._commit(version)
        if report is None:
            self._registry.void_load(self.name)
            return
        self._registry.end_commit(self.name, self._shared.now())
        if version == self._registry.newest:
            self._shared.reports.append(report)
            if self.member.state is not ConsumerState.SERVING:
                await self._serve(version)

    async def _prepare(self, ticket: WeightTicket) -> bool:
        """Return whether a version is prepared; False if it is no longer wanted.

        Raises the consumer's error, or WaitTimeout.
        """
        version = ticket.version
        preparing = asyncio.create_task(
            self._in_time(self.consumer.prepare(ticket), f"prepare version {version}")
        )
        overtaken = asyncio.create_task(self._overtaken(version))
        try:
            await asyncio.wait({preparing, overtaken}, return_when=asyncio.FIRST_COMPLETED)
            # A newer version takes no longer than what is left of this one, which nothing may serve.
            return preparing.done() and not self._is_void(version, preparing.exception())
        finally:
            for task in (preparing, overtaken):
                task.cancel()
            await asyncio.gather(preparing, overtaken, return_exceptions=True)

    async def _overtaken(self, version: int) -> None:
        """Return when another version is wanted, or none."""
        while self._registry.wanted(self.name) == version:
            self._offered.clear()
            await self._offered.wait()

    async def _commit(self, version: int) -> LoadReport | None:
        """Return the report of a commit, or None if its memory was overwritten.

        Raises the consumer's error, or WaitTimeout.
        """
        try:
            report = await self._in_time(self.consumer.commit(version), f"load version {version}")
        except Exception as error:  # noqa: BLE001  raised again unless the commit is void
            if self._is_void(version, error):
                return None
            raise
        # Otherwise it may have read a mixture of two versions, with which it has generated nothing.
        return None if version <= self._registry.retired else report

    def _is_void(self, version: int, error: BaseException | None) -> bool:
        """Return whether a newer version took the memory away, which is no failure. Raises other errors."""
        if error is None:
            return False
        if version > self._registry.retired or isinstance(error, WaitTimeout):
            raise error
        return True

    async def _in_time(self, work: Awaitable[T], what: str) -> T:
        return await within(
            work,
            self._shared.load_timeout_s,
            owner="param_update",
            what=f"{self.name} to {what}",
            holder=lambda: f"{self.name} does not respond",
        )

    async def _serve(self, version: int) -> None:
        """Enter the rotation, with the newest version."""
        event, line = "REJOINED", f"{self.name} serves again, version {version}"
        if self.member.state is ConsumerState.BEHIND:
            event, line = "CAUGHT_UP", f"{self.name} has caught up and serves version {version}"
        elif not self.has_served:
            event, line = "JOINED", f"{self.name} has joined and serves version {version}"
        # First, so that a version that is offered now waits for it.
        self._registry.fire(self.name, ConsumerEvent.SERVE)
        async with self._listing:
            await within(self.consumer.join(), ASK_S, owner=self.name, what="the balancer to add it")
            self._listed = True
        self.has_served, self._attempt = True, 0
        self._shared.note(event, self.name, version)
        self._shared.say(line)

    async def _check(self) -> None:
        """Check it at intervals. Never returns; raises if it does not work."""
        await self._shared.watched.wait()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if self._shared.begun.is_set() and self.member.state in HAS_REQUESTS:
                await within(
                    self.consumer.check(),
                    self._shared.load_timeout_s,
                    owner="the pipeline",
                    what=f"{self.name} to respond to a check",
                    holder=lambda: f"{self.name} does not respond",
                )

    async def _until_given_up(self) -> None:
        await self._given_up.wait()
        self._given_up.clear()
        raise WeightSyncError(self._why_given_up)

    async def _fail(self, error: Exception) -> bool:
        """Fence it, or count a failed restart. Return whether it is to be restarted."""
        shared, why = self._shared, describe_error(error)
        shared.last_error, self._must_start = error, True
        if not self.has_served:
            self._registry.fire(self.name, ConsumerEvent.LEAVE)
            self.member.why = why
            shared.say(f"{self.name} could not join: {why}")
            await self._end_for_good(why)
            return False

        if self.member.state is not ConsumerState.FENCED:
            self._registry.fire(self.name, ConsumerEvent.FAIL)
        self.member.why = why
        if self._attempt == 0:
            await self._fence(why)
        else:
            shared.note("ABSENT", self.name, None)
            shared.say(f"{self.name} did not return (attempt {self._attempt} of {ATTEMPTS}). {why}")
        shared.changed.notify()
        # A consumer of a run in which none has ever served is not restarted: nothing has ever worked.
        await shared.begun.wait()
        if self._attempt == ATTEMPTS:
            self._registry.fire(self.name, ConsumerEvent.GIVE_UP)
            shared.changed.notify()
            return False
        self._attempt += 1
        return True

    async def _fence(self, why: str) -> None:
        shared, now = self._shared, self._shared.now()
        shared.failures[self.name] = why
        self._falls = [*(at for at in self._falls if now - at < MEMORY_S), now]
        shared.note("FENCED", self.name, None)
        shared.say(f"{self.name} is fenced and restarts; {len(self._registry.rotation)} still serve. {why}")
        shared.slots.wake()
        await self._out_of_the_rotation()

    async def _out_of_the_rotation(self) -> None:
        self._shared.changed.notify()
        async with self._listing:
            if self._listed:
                await within(
                    self.consumer.leave(),
                    ASK_S,
                    owner="param_update",
                    what=f"the balancer to remove {self.name}",
                )
                self._listed = False
        self._shared.changed.notify()

    async def _drained(self) -> None:
        """Return when it has no open request, or is given up."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._given_up.wait(), DRAIN_POLL_S)
                return
            if not await self.consumer.open_requests():
                return

    async def _end_for_good(self, why: str) -> None:
        """End its processes and free its devices; failures to do so are reported."""
        for what, ending in (("end", self.consumer.end), ("free the devices of", self.consumer.release)):
            try:
                await within(ending(), ASK_S, owner="the pipeline", what=f"{self.name} to leave")
            except Exception as error:  # noqa: BLE001  the run does not need it
                self._shared.say(f"could not {what} {self.name}: {describe_error(error)}")
        self.member.reading = None
        self._registry.fire(self.name, ConsumerEvent.END)
        self._shared.note("LEFT", self.name, self.member.version)
        self._shared.say(f"{self.name} has left: {why}")
        self._shared.changed.notify()


def describe_error(error: Exception) -> str:
    """Return kind and message. vLLM's errors repeat themselves on further lines."""
    text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0]}"


def back_off_s(failures: int) -> float:
    """Return the delay before restarting a consumer that has failed this many times."""
    return 0.0 if failures < 2 else min(BACK_OFF_S * 2.0 ** (failures - 2), LONGEST_BACK_OFF_S)
