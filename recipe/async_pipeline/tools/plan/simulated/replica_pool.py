# SPDX-License-Identifier: Apache-2.0
"""All engines of a run, and the requests to them.

Requests go to the replica with the fewest open ones; later turns of a response stay on its replica.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Any

from ....core.waits.clock import VirtualTimeLoop
from ..profile import Decode
from .draws import ResponseCost
from .least_busy import LeastBusy
from .replica import TICK_S, Replica, Served, SimulatedGroup, SimulatedResponse


class ReplicaPool:
    """The engines. Their events are not timers of the loop; only the end of a group is."""

    def __init__(self, replicas: int, decode: Decode, observation_tokens: float = 0.0) -> None:
        """Create the engines. Requires a running VirtualTimeLoop."""
        step_s = [0.0, *(decode.step_s(c) for c in range(1, decode.slots + 1))]
        self.replicas = [Replica(i, step_s) for i in range(replicas)]
        self.events = 0
        """Number of turns, waits and wake-ups so far."""

        self._read_s = decode.prefill_token_s
        self._observation_s = observation_tokens * decode.prefill_token_s
        self._least_busy = LeastBusy(self.replicas)
        self._waiting: deque[SimulatedResponse] = deque()
        """Requests while no replica is up."""
        self._checks: list[tuple[float, int, Any]] = []
        """When a replica may have finished a turn. Apart from `_heap`, which is a hundred times as large."""
        self._heap: list[tuple[float, int, SimulatedResponse | SimulatedGroup]] = []
        """When a response sends its next turn, or a group is done."""
        self._order = count()
        self._touched: dict[Replica, None] = {}
        self._ended = False

        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop), "engines are modelled in virtual time only"
        self._loop = loop
        loop.attach(self._advance)

    async def generate(self, costs: Sequence[ResponseCost]) -> list[Served]:
        """Generate and score the responses to one prompt. Gives them up when cancelled."""
        group = SimulatedGroup(costs)
        now = self._loop.time()
        for response in group.responses:
            self._request(now, response)
        self._plan(now)
        try:
            await group.done
        except asyncio.CancelledError:
            self._give_up(group)
            raise
        return [Served(response.first, response.last, tuple(response.spans)) for response in group.responses]

    def end(self) -> None:
        """Forget all requests; the tasks that wait for them will be cancelled."""
        self._ended = True
        self._checks, self._heap = [], []

    def stall(self, replica: Replica, seconds: float) -> None:
        """Stop a replica for `seconds`."""
        now = self._loop.time()
        replica.freeze(now, seconds)

    def serve(self, replica: Replica, version: int) -> None:
        """Have a replica serve a version."""
        replica.serve(self._loop.time(), version)

    def take_open_s(self, replica: Replica) -> float:
        """Return the seconds in which a replica had open requests since the last call."""
        now = self._loop.time()
        open_s = replica.open_s + (now - replica.open_since if replica.open else 0.0)
        replica.open_s, replica.open_since = 0.0, now
        return open_s

    def fail(self, replica: Replica) -> None:
        """Fail a replica until `revive`; its responses restart their turn on another one."""
        now = self._loop.time()
        if not replica.is_up:
            return
        self._least_busy.remove(replica)
        lost = replica.fail(now)
        if replica.open:
            replica.open_s += now - replica.open_since
        replica.open = 0
        replica.wake_at = math.inf

        for response in lost:
            response.replica = None
            response.started = response.turn > 0  # nothing of a first turn remains, so no version wrote it
            self._request(now, response)
        self._plan(now)

    def revive(self, replica: Replica, version: int) -> None:
        """Let a failed replica serve again, with `version`."""
        now = self._loop.time()
        replica.pass_to(now)
        replica.is_up, replica.version = True, version
        self._least_busy.add(replica)
        while self._waiting:
            self._request(now, self._waiting.popleft())
        self._plan(now)

    def _request(self, now: float, response: SimulatedResponse) -> None:
        """Send the next turn of a response to a replica."""
        if response.dead:
            return
        replica = response.replica
        if replica is None or not replica.is_up:
            replica = self._least_busy.pick()
            if replica is None:
                self._waiting.append(response)
                return
            moved, response.replica = response.turn > 0, replica
            read_s = response.cost.prompt_tokens * self._read_s + response.turn * self._observation_s
            if moved:  # the new replica also has to read the turns so far
                read_s += response.written * self._read_s
        else:
            read_s = self._observation_s

        if not replica.open:
            replica.open_since = now
        self._least_busy.one_more(replica)
        replica.begin(now, response, read_s)
        self._touched[replica] = None

    def _continue(self, now: float, response: SimulatedResponse) -> None:
        """Send a later turn of a response to its replica."""
        if response.dead:
            return
        replica = response.replica
        if replica is None or not replica.is_up:
            self._request(now, response)
            self._plan(now)
            return

        if not replica.open:
            replica.open_since = now
        self._least_busy.one_more(replica)
        replica.begin(now, response, self._observation_s)

        # As `_plan_one`, written out: every turn of every response comes here.
        turns = replica.heap
        if turns[0][2].dead:
            self._plan_one(now, replica)
            return
        since = replica.frozen_until
        if now > since:
            since = now
        at = since + (turns[0][0] - replica.steps) * replica.step_s[replica.running]
        if at < replica.wake_at:
            replica.wake_at = at
            heappush(self._checks, (at, next(self._order), replica))

    def _close(self, now: float, replica: Replica) -> None:
        """Count a finished request."""
        if replica.open == 1:
            replica.open_s += now - replica.open_since
        self._least_busy.one_less(replica)

    def _check(self, now: float, replica: Replica) -> None:
        """Process the first entry of `_checks`: the turns that its replica has finished; replace it."""
        checks, turns = self._checks, replica.heap
        if now < replica.wake_at - TICK_S:
            heappop(checks)  # outdated: the replica has been checked since
            return

        if turns and not turns[0][2].dead:
            since = replica.frozen_until
            if replica.at > since:
                since = replica.at
            at = since + (turns[0][0] - replica.steps) * replica.step_s[replica.running]
            if at > now + TICK_S:
                # Too early: responses that started since the entry was made slow the first one down.
                replica.wake_at = at
                heapreplace(checks, (at, next(self._order), replica))
                return

        for response in replica.finished(now):
            self._close(now, replica)
            cost, turn = response.cost, response.turn
            response.written += cost.turn_tokens[turn]
            response.turn = turn + 1
            if turn < len(cost.tool_s):
                heappush(self._heap, (now + cost.tool_s[turn], next(self._order), response))
            else:
                response.last = replica.version
                self._score(now, response)

        # As `_plan_one`, written out; `finished` has removed dead responses from the front.
        if not turns:
            replica.wake_at = math.inf
            heappop(checks)
            return
        since = replica.frozen_until
        if now > since:
            since = now
        replica.wake_at = at = since + (turns[0][0] - replica.steps) * replica.step_s[replica.running]
        heapreplace(checks, (at, next(self._order), replica))

    def _score(self, now: float, response: SimulatedResponse) -> None:
        """Score a finished response; finish its group after the last one."""
        group = response.group
        scored_at = now + response.cost.reward_s
        if scored_at > group.scored_at:
            group.scored_at = scored_at
        group.left -= 1
        if not group.left:
            heappush(self._heap, (group.scored_at, next(self._order), group))

    def _give_up(self, group: SimulatedGroup) -> None:
        """Remove a group's responses from their replicas."""
        if self._ended:
            return
        now = self._loop.time()
        for response in group.responses:
            runs = response.replica is not None and response.last < 0 and self._is_open(response)
            response.dead = True
            if runs:
                assert response.replica is not None
                response.replica.forget(now, response)
                self._close(now, response.replica)
                self._touched[response.replica] = None
        self._plan(now)

    def _is_open(self, response: SimulatedResponse) -> bool:
        """Return whether a response is with its replica, and not with a tool."""
        replica = response.replica
        assert replica is not None
        return any(one is response for _, _, one in replica.heap) or any(
            one is response for _, one in replica.queue
        )

    # Time.

    def _plan(self, now: float) -> None:
        """Plan the next check of each replica that changed."""
        for replica in self._touched:
            if replica.is_up:
                self._plan_one(now, replica)
        self._touched.clear()

    def _plan_one(self, now: float, replica: Replica) -> None:
        """Plan the next check of a replica that is up."""
        at = replica.next_at(now)
        # A new response slows the others down: the planned check is then early, which costs one check.
        if at < replica.wake_at:
            replica.wake_at = at
            heappush(self._checks, (at, next(self._order), replica))

    def _advance(self, until: float) -> None:
        """Process events in order, up to `until` or the end of a group."""
        heap, checks = self._heap, self._checks
        events = 0
        while heap or checks:
            if checks and not (heap and heap[0] < checks[0]):
                now, _, replica = checks[0]
                if now > until:
                    break
                events += 1
                self._check(now, replica)
                continue

            now, _, subject = heap[0]
            if now > until:
                break
            events += 1
            heappop(heap)
            if isinstance(subject, SimulatedResponse):
                self._continue(now, subject)
            else:
                # The engines continue after the caller of the group, since it may send more requests.
                self._loop.call_at(now, _settle, subject.done)
                break
        self.events += events


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
