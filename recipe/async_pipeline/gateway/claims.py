# SPDX-License-Identifier: Apache-2.0
"""Tasks that external runners claim, each with a lease.

    offer(task) ──► OFFERED ──claim──► LEASED ──finish──► its reward
                       ▲                 │ ├────fail────► ClaimLost: what the runner reports
                       │                 │ └─not renewed─► ClaimLost: the lease has expired
                       └── one owner ────┘

A task whose lease has ended is not offered again: its episode is, with other keys, so that what a late runner
still sends belongs to nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import RequestRefused


class ClaimLost(Exception):  # noqa: N818 - the runner is at fault, which the caller reports
    """The runner of a task has failed or does not answer."""


class Claimed(NamedTuple):
    """What a runner gets."""

    lease: str
    """The key of the task: its holder may renew, finish and fail it."""
    lease_s: float
    """Seconds until the lease expires unless it is renewed."""
    task: Mapping[str, Any]


class Offer:
    """A task from its offer to its end. Belongs to the loop in which it was made."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.task = task
        self.claimed: asyncio.Future[None] = loop.create_future()
        """Done when a runner has claimed it."""
        self.ended: asyncio.Future[float | None] = loop.create_future()
        """Its reward, or None without one. Raises ClaimLost."""
        self.timer: asyncio.TimerHandle | None = None


class Claims:
    """The tasks of a process that wait for a runner, and the ones that a runner plays."""

    def __init__(self, lease_s: float) -> None:
        self.key = "sk-run-" + secrets.token_urlsafe(32)
        """Claims tasks: for runners, not for agents."""
        self._lease_s = lease_s
        self._offered: deque[Offer] = deque()
        self._leased: dict[str, Offer] = {}
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done at the next offer."""
        self.waiting = 0
        """Runners that wait for a task."""

    async def offer(self, task: Mapping[str, Any]) -> Offer:
        """Let runners claim a task. Call `withdraw` when it is no longer needed."""
        offer = Offer(task)
        self._offered.append(offer)
        self._news.set_result(None)
        self._news = asyncio.get_running_loop().create_future()
        return offer

    def withdraw(self, offer: Offer) -> None:
        """Forget a task; its lease, if it has one, ends. Idempotent."""
        if offer in self._offered:
            self._offered.remove(offer)
        for lease in [lease for lease, one in self._leased.items() if one is offer]:
            self._end(lease)

    async def claim(self, wait_s: float) -> Claimed | None:
        """Return a task with a new lease, or None if there is no task within `wait_s` seconds.

        Cancel it if the runner has gone.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        self.waiting += 1
        try:
            while not self._offered:
                if loop.time() >= until:
                    return None
                # Unlike `wait_for`, it never swallows a cancellation.
                await asyncio.wait({self._news}, timeout=until - loop.time())
        finally:
            self.waiting -= 1
        offer = self._offered.popleft()
        lease = "sk-lease-" + secrets.token_urlsafe(32)
        self._leased[lease] = offer
        self._schedule(lease, offer)
        offer.claimed.set_result(None)
        return Claimed(lease, self._lease_s, offer.task)

    def renew(self, lease: str) -> None:
        """Start the time of a lease again. Raises RequestRefused if it has ended."""
        self._schedule(lease, self._of(lease))

    def finish(self, lease: str, reward: float | None) -> None:
        """End a task with its reward. Raises as `renew`."""
        self._of(lease).ended.set_result(reward)
        self._end(lease)

    def fail(self, lease: str, why: str) -> None:
        """End a task that its runner cannot play. Raises as `renew`."""
        self._lose(lease, f"its runner reports: {why}"[:500])

    def _of(self, lease: str) -> Offer:
        offer = self._leased.get(lease)
        if offer is None:
            raise RequestRefused("the lease has ended: another runner may play this task", status=410)
        return offer

    def _schedule(self, lease: str, offer: Offer) -> None:
        if offer.timer is not None:
            offer.timer.cancel()
        why = f"its runner has not renewed its lease for {self._lease_s:g} s"
        offer.timer = asyncio.get_running_loop().call_later(self._lease_s, self._lose, lease, why)

    def _lose(self, lease: str, why: str) -> None:
        self._of(lease).ended.set_exception(ClaimLost(why))
        self._end(lease)

    def _end(self, lease: str) -> None:
        offer = self._leased.pop(lease)
        if offer.timer is not None:
            offer.timer.cancel()
        if not offer.ended.done():
            offer.ended.cancel()
