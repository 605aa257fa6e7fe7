# SPDX-License-Identifier: Apache-2.0
"""The consumers of a run: bring each version to all of them; consumers join, leave, fail and return.

A consumer computes with published weights: a rollout replica. Each has a keeper
(`keeper.py`), which loads new versions and restarts it after a failure; `registry.py` has the states. All
consumers prepare a version at once, and take turns to commit it. The trainer is not involved: the newest
version stays in host memory until every consumer of the rotation serves the next one. If none is left there,
an update waits for the first that returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from ...core.groups.items import LoadReport
from ...core.waits.deadline import within
from ...core.waits.wait_graph import Holders
from ...core.waits.wait_queue import Turnstile
from ...errors import WeightSyncError
from ..memory.manifest import WeightTicket
from .keeper import ASK_S, Keeper, Shared
from .preparation import Consumer
from .registry import HAS_REQUESTS, ConsumerEvent, ConsumerState, LoadPhase, Member, Registry

GRACE_S = 30.0
"""Added to deadlines here, so that the consumer's own deadline fires first: its message is more precise."""
RETIRE_S = 10.0
"""Seconds that a slow consumer gets to finish a commit whose memory is needed for a newer version."""


class UpdateOutcome(NamedTuple):
    """The result of one weight update."""

    reports: list[LoadReport]
    """One for each consumer that loaded the version."""
    failures: Mapping[str, str]
    """Consumers that were fenced during the update, with the reason."""


class Fleet:
    """The consumers of a run and their keepers."""

    def __init__(
        self,
        consumers: Sequence[Consumer],
        say: Callable[[str], None],
        *,
        load_timeout_s: float,
        restart_timeout_s: float,
        grace_s: float = GRACE_S,
        wait_timeout_s: float | None = None,
        max_concurrent_loads: Callable[[int, float | None], int] = lambda consumers, commit_s: 1,
        note: Callable[[str, str, int | None], None] = lambda event, name, version: None,
    ) -> None:
        """Set the consumers that serve from the beginning, the deadlines, and who is notified.

        `wait_timeout_s` bounds the wait for weights that another task holds. `max_concurrent_loads` maps the
        number of consumers that serve, and the longest of their last commits in seconds (None: unknown), to
        how many of them may commit at the same time. `say` gets one line
        for the user whenever a consumer joins, leaves, falls behind, is fenced, or fails to return; `note`
        gets the event (JOINING, JOINED, BEHIND, CAUGHT_UP, FENCED, ABSENT, REJOINED, LEAVING or LEFT), the
        consumer's name and its version.
        """
        self.registry = registry = Registry()
        self._shared = Shared(
            registry=self.registry,
            load_timeout_s=load_timeout_s + grace_s,
            restart_timeout_s=restart_timeout_s,
            slots=Turnstile(
                lambda: (
                    max_concurrent_loads(len(registry.rotation), registry.longest_commit_s())
                    - registry.commits_in_rotation()
                )
            ),
            say=say,
            note=note,
        )
        self._keepers = {one.name: Keeper(one, self._shared, started=True) for one in consumers}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        """The error that ends the run."""
        self._weights = asyncio.Lock()
        self._holder = ""
        """The task that holds the weights."""
        self._wait_timeout_s = wait_timeout_s

    @property
    def serving(self) -> list[Consumer]:
        """The consumers of the rotation."""
        return [self._keepers[member.name].consumer for member in self.registry.rotation]

    @property
    def versions(self) -> dict[str, int]:
        """The version that each consumer of the rotation serves, by name."""
        return {m.name: m.version for m in self.registry.rotation if m.version is not None}

    @property
    def fenced(self) -> dict[str, str]:
        """Why each consumer that has failed does not serve, by name."""
        return {
            m.name: m.why
            for m in self.registry.within(ConsumerState.FENCED, ConsumerState.AWAY, ConsumerState.JOINING)
            if m.why
        }

    @property
    def members(self) -> list[Member]:
        """All consumers that have not left."""
        return [m for m in self.registry.members.values() if m.state is not ConsumerState.LEFT]

    @property
    def joined(self) -> int:
        """The number of consumers that have served and have not left."""
        return sum(self._keepers[member.name].has_served for member in self.members)

    def consumer(self, name: str) -> Consumer:
        """Return the consumer of this name."""
        return self._keepers[name].consumer

    def has_left(self, name: str) -> bool:
        """Return whether the consumer of this name has left."""
        return self.registry.members[name].state is ConsumerState.LEFT

    # Weight updates.

    async def publish(self, ticket: WeightTicket) -> UpdateOutcome:
        """Offer a version; return when every consumer of the rotation serves it.

        Consumers that fail or are too slow leave the rotation meanwhile, and the others continue. Waits for:
        the loads; if no consumer is left, the first one that returns. Raises the last consumer's error, or
        WaitTimeout naming the consumer that did not respond, if this is the first version of the run or no
        consumer can return. Raises WeightSyncError if the version is not newer than the last.
        """
        self._keep_all()
        shared, version = self._shared, ticket.version
        async with self.weights("param_update"):
            self.registry.offer(version)
            shared.ticket, shared.reports, shared.failures = ticket, [], {}
            for keeper in self._keepers.values():
                keeper.offer()
            while not self._is_served(version):
                self._require_a_consumer()
                # Others may fail or finish while the balancer removes one.
                while late := self.registry.late(shared.now()):
                    await self._keepers[late[0]].fall_behind()
                if not self._is_served(version):
                    await self._next_change(f"the replicas to serve version {version}")
            shared.begun.set()
        return UpdateOutcome(list(shared.reports), dict(shared.failures))

    async def retire(self, version: int) -> None:
        """Prepare for the memory of `version`, and of all older ones, to be overwritten.

        Loads of these versions outside of the rotation are void from here on. A consumer that could generate
        with what a commit reads there gets `RETIRE_S` to finish, then it is ended. Raises WaitTimeout if it
        cannot be ended.
        """
        self.registry.retire(version)

        def readers() -> list[Member]:
            return self.registry.in_the_way(version)

        async def gone() -> None:
            while readers():
                await self._shared.changed.wait()

        def end_them() -> None:
            for member in readers():
                why = f"it still loads version {member.reading}, whose memory is needed"
                self._keepers[member.name].give_up(why)

        for keeper in self._keepers.values():
            keeper.offer()
        if not readers():
            return
        timer = asyncio.get_running_loop().call_later(RETIRE_S, end_them)
        try:
            await within(
                gone(),
                RETIRE_S + 2 * ASK_S,
                owner="param_update",
                what=f"the loads of version {version} to end",
                holder=lambda: ", ".join(m.name for m in readers()),
            )
        finally:
            timer.cancel()

    @asynccontextmanager
    async def weights(self, owner: str) -> AsyncIterator[None]:
        """Hold the weights: no consumer of the rotation changes version until this is left.

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

    async def watch(self) -> None:
        """Check the consumers and fence each that stops working. Never returns.

        Raises the last consumer's error if none is left and none returns, or WaitTimeout if the balancer
        does not respond.
        """
        self._keep_all()
        self._shared.watched.set()
        while True:
            if self._shared.begun.is_set():
                self._require_a_consumer()
            await self._shared.changed.wait()

    # Joining and leaving.

    def add(self, consumer: Consumer) -> None:
        """Start a consumer; it serves when it has loaded and verified the newest version.

        If it fails to, it leaves. Raises WeightSyncError if there is a consumer of this name.
        """
        keeper = self._keepers[consumer.name] = Keeper(consumer, self._shared, started=False)
        self._run(consumer.name, keeper.run())

    def remove(self, name: str, timeout_s: float) -> None:
        """Have a consumer finish its open requests, for at most `timeout_s`, and end.

        Raises WeightSyncError if there is no such consumer, it is leaving already, or no other one serves.
        """
        member = self.registry.members.get(name)
        if member is None or member.state is ConsumerState.LEFT:
            known = ", ".join(m.name for m in self.members)
            raise WeightSyncError(f"there is no {name}; the run has {known}")
        if member.state is ConsumerState.LEAVING:
            raise WeightSyncError(f"{name} is leaving already")
        if not any(m.name != name for m in self.registry.rotation):
            raise WeightSyncError(f"{name} cannot leave: no other replica serves; add one first")
        keeping, keeper = self._tasks[name], self._keepers[name]
        drain_s = timeout_s if member.state in HAS_REQUESTS else 0.0
        # At once, so that a version that is offered now does not wait for it, and it serves none.
        keeping.cancel()
        self.registry.fire(name, ConsumerEvent.LEAVE)
        self._shared.changed.notify()

        async def leave() -> None:
            await asyncio.gather(keeping, return_exceptions=True)
            await keeper.depart(drain_s)

        self._run(name, leave())

    async def close(self) -> None:
        """Cancel all pending loads and restarts."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep_all(self) -> None:
        """Start the keepers of the first consumers; a fleet may be made before its event loop."""
        for name, keeper in self._keepers.items():
            if name not in self._tasks:
                self._run(name, keeper.run())

    def _run(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(coroutine, name=f"keep:{name}")
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failure = self._failure or error
            self._shared.changed.notify()

    def _is_served(self, version: int) -> bool:
        leaving = any(keeper.is_leaving_the_rotation for keeper in self._keepers.values())
        return self.registry.serves(version) and not leaving

    async def _next_change(self, what: str) -> None:
        """Wait until the registry changes or a load becomes late."""
        shared, late_at = self._shared, self.registry.next_late()
        timer = None
        if late_at is not None and late_at > shared.now():
            timer = asyncio.get_running_loop().call_at(late_at, shared.changed.notify)
        try:
            # No deadline here: each load and each restart has its own.
            await within(shared.changed.wait(), None, owner="param_update", what=what, holder=self.hold_ups)
        finally:
            if timer is not None:
                timer.cancel()

    def hold_ups(self) -> str:
        """Return what each consumer does that a publication waits for, and which ones are away."""
        doing = {
            LoadPhase.PREPARING: "prepares",
            LoadPhase.PREPARED: "waits for its turn to load",
            LoadPhase.COMMITTING: "loads",
        }
        loading = [f"{m.name} {doing[m.phase]} version {m.loading}" for m in self.members if m.phase in doing]
        return "; ".join([*loading, *(f"{name} is away: {why}" for name, why in self.fenced.items())])

    def _require_a_consumer(self) -> None:
        """Raise what ends the run, if anything does."""
        if self._failure is not None:
            raise self._failure
        able = self.registry.can_serve if self._shared.begun.is_set() else bool(self.registry.rotation)
        if not able and self._shared.last_error is not None:
            raise self._shared.last_error
