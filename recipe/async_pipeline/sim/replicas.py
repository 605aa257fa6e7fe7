# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: continuous batching as processor sharing, in O(log n) an answer instead of an event a
token.

Each step of an engine gives one token to every answer that it works on, and takes `step_s(c)` with c of them.
So all
progress alike, and it is enough to know how many steps a replica has made since it started (its *virtual
time*): an
answer of k tokens that starts at virtual time v is finished at v + k, whatever happens in between. Only the
speed
of virtual time changes, 1 / step_s(c), and it is 0 while a prompt is read or weights are loaded. This is the
virtual
time of generalized processor sharing (Parekh & Gallager, "A generalized processor sharing approach to flow
control",
1993), with a service rate that depends on the number of customers.

Requests go to the replica with the fewest open ones; later turns of an answer go where its first went.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from ..core.clock import VirtualTimeLoop
from .draws import AnswerCost
from .profile import Decode

TICK_S = 1e-9
"""Closer together than this is the same time; the resolution of the virtual loop."""


class Served(NamedTuple):
    """Which versions wrote an answer."""

    first_version: int
    last_version: int


class Answer:
    """One answer on its way."""

    __slots__ = ("cost", "dead", "first", "group", "index", "last", "replica", "started", "turn")

    def __init__(self, group: Group, index: int, cost: AnswerCost) -> None:
        self.group, self.index, self.cost = group, index, cost
        self.turn = 0
        self.replica: Replica | None = None
        self.dead = self.started = False
        self.first = self.last = -1


class Group:
    """The answers to one prompt; `done` is set when the last of them is scored."""

    __slots__ = ("answers", "done", "left", "scored_at")

    def __init__(self, costs: Sequence[AnswerCost]) -> None:
        self.answers = [Answer(self, i, cost) for i, cost in enumerate(costs)]
        self.left = len(self.answers)
        self.scored_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Replica:
    """One engine. `begin`, `stop` and `due` move its virtual time on to `now` first."""

    __slots__ = (
        "at",
        "frozen_until",
        "heap",
        "index",
        "is_up",
        "open",
        "open_s",
        "open_since",
        "place",
        "queue",
        "running",
        "steps",
        "wake_at",
        "version",
        "_step_s",
        "_order",
    )

    def __init__(self, index: int, step_s: Sequence[float]) -> None:
        """`step_s[c]`: seconds of a step with c answers; its length bounds how many there may be."""
        self.index, self._step_s = index, step_s
        self.steps = self.at = self.frozen_until = 0.0
        self.heap: list[tuple[float, int, Answer]] = []
        """By the virtual time at which they are finished."""
        self._order = count()
        self.queue: deque[tuple[float, Answer]] = deque()
        """Seconds of reading, and the answer."""
        self.running = self.open = self.place = 0
        self.open_s = self.open_since = 0.0
        self.wake_at = math.inf
        self.is_up = True
        self.version = -1

    def pass_to(self, now: float) -> None:
        """Let virtual time pass."""
        if now <= self.at:
            return
        since = self.frozen_until if self.frozen_until > self.at else self.at
        if self.running and now > since:
            self.steps += (now - since) / self._step_s[self.running]
        self.at = now

    def freeze(self, now: float, seconds: float) -> None:
        """Make no step for so long, after what else it stands still for."""
        self.pass_to(now)
        self.frozen_until = max(self.frozen_until, now) + seconds

    def begin(self, now: float, answer: Answer, read_s: float) -> None:
        """Work on a turn, or queue it."""
        self.pass_to(now)
        if self.running >= len(self._step_s) - 1:
            self.queue.append((read_s, answer))
        else:
            self._admit(now, answer, read_s)

    def finished(self, now: float) -> list[Answer]:
        """Answers whose turn is finished; those that queued take their places."""
        self.pass_to(now)
        done: list[Answer] = []
        while self.heap and self.next_at(now) <= now + TICK_S:
            end, _, answer = heappop(self.heap)
            if end > self.steps:
                self.steps = end
            self.running -= 1
            done.append(answer)
            if self.queue:
                self._admit_queued(now)
        return done

    def next_at(self, now: float) -> float:
        """When the next turn is finished if nothing changes. Virtual time must have passed to `now`."""
        heap = self.heap
        while heap and heap[0][2].dead:
            heappop(heap)
        if not heap:
            return math.inf
        since = self.frozen_until if self.frozen_until > now else now
        return since + (heap[0][0] - self.steps) * self._step_s[self.running]

    def forget(self, now: float, answer: Answer) -> None:
        """An answer that runs or queues here is given up; it is marked as dead already."""
        self.pass_to(now)
        queued = len(self.queue)
        self.queue = deque(entry for entry in self.queue if entry[1] is not answer)
        if len(self.queue) == queued:
            self.running -= 1
            self._admit_queued(now)

    def fail(self, now: float) -> list[Answer]:
        """Lose all that is open; returns it."""
        self.pass_to(now)
        lost = [answer for _, _, answer in self.heap if not answer.dead] + [
            answer for _, answer in self.queue
        ]
        self.heap, self.queue = [], deque()
        self.running, self.is_up = 0, False
        self.frozen_until = now
        return lost

    def _admit_queued(self, now: float) -> None:
        while self.queue and self.running < len(self._step_s) - 1:
            read_s, answer = self.queue.popleft()
            self._admit(now, answer, read_s)

    def _admit(self, now: float, answer: Answer, read_s: float) -> None:
        if not answer.started:
            answer.started, answer.first = True, self.version
        if read_s:
            self.frozen_until = max(self.frozen_until, now) + read_s
        self.running += 1
        heappush(self.heap, (self.steps + answer.cost.turn_tokens[answer.turn], next(self._order), answer))


class LeastBusy:
    """Replicas by the number of their open requests; finding one of the least busy is O(1).

    Sound because a count changes by one at a time.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._buckets: list[list[Replica]] = [[]]
        self._fewest = 0
        for replica in reversed(replicas):
            self.add(replica)

    def pick(self) -> Replica | None:
        """One of those with the fewest open requests; None: there is no replica."""
        while self._fewest < len(self._buckets) and not self._buckets[self._fewest]:
            self._fewest += 1
        return self._buckets[self._fewest][-1] if self._fewest < len(self._buckets) else None

    def add(self, replica: Replica) -> None:
        while len(self._buckets) <= replica.open + 1:
            self._buckets.append([])
        self._put(replica)

    def remove(self, replica: Replica) -> None:
        bucket = self._buckets[replica.open]
        last = bucket.pop()
        if last is not replica:
            bucket[replica.place] = last
            last.place = replica.place

    def one_more(self, replica: Replica) -> None:
        """Another request is open."""
        self.remove(replica)
        replica.open += 1
        if replica.open >= len(self._buckets):
            self._buckets.append([])
        self._put(replica)

    def one_less(self, replica: Replica) -> None:
        self.remove(replica)
        replica.open -= 1
        self._put(replica)

    def _put(self, replica: Replica) -> None:
        bucket = self._buckets[replica.open]
        replica.place = len(bucket)
        bucket.append(replica)
        if replica.open < self._fewest:
            self._fewest = replica.open


class ReplicaPool:
    """All engines of a run. Their events are no timers of the loop; only the end of a group is."""

    def __init__(self, replicas: int, decode: Decode, observation_tokens: float = 0.0) -> None:
        """Wants a VirtualTimeLoop to be running."""
        step_s = [0.0, *(decode.step_s(c) for c in range(1, decode.slots + 1))]
        self.replicas = [Replica(i, step_s) for i in range(replicas)]
        self.events = 0
        """Turns, waits and wake-ups so far."""
        self._read_s = decode.prefill_token_s
        self._observation_s = observation_tokens * decode.prefill_token_s
        self._least_busy = LeastBusy(self.replicas)
        self._waiting: deque[Answer] = deque()
        """While no replica is up."""
        self._heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._order = count()
        self._touched: dict[Replica, None] = {}
        self._handed_over = False
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop), "engines are modelled in virtual time only"
        self._loop = loop
        loop.attach(self._go_on)

    async def answer(self, costs: Sequence[AnswerCost]) -> list[Served]:
        """Answer one prompt and score the answers. Cancelled, it gives them up."""
        group = Group(costs)
        now = self._loop.time()
        for answer in group.answers:
            self._request(now, answer)
        self._plan(now)
        try:
            await group.done
        except asyncio.CancelledError:
            self._give_up(group)
            raise
        return [Served(answer.first, answer.last) for answer in group.answers]

    def stall(self, replica: Replica, seconds: float) -> None:
        """A replica stands still from now on."""
        now = self._loop.time()
        replica.freeze(now, seconds)

    def take_open_s(self, replica: Replica) -> float:
        """Seconds in which it had requests open since this was asked last."""
        now = self._loop.time()
        open_s = replica.open_s + (now - replica.open_since if replica.open else 0.0)
        replica.open_s, replica.open_since = 0.0, now
        return open_s

    def fail(self, replica: Replica) -> None:
        """A replica is gone until `revive`; what it was answering starts its turn anew elsewhere."""
        now = self._loop.time()
        if not replica.is_up:
            return
        self._least_busy.remove(replica)
        lost = replica.fail(now)
        if replica.open:
            replica.open_s += now - replica.open_since
        replica.open = 0
        replica.wake_at = math.inf
        for answer in lost:
            answer.replica = None
            answer.started = answer.turn > 0  # of a first turn nothing is left that a version wrote
            self._request(now, answer)
        self._plan(now)

    def revive(self, replica: Replica, version: int) -> None:
        """A replica serves again."""
        now = self._loop.time()
        replica.pass_to(now)
        replica.is_up, replica.version = True, version
        self._least_busy.add(replica)
        while self._waiting:
            self._request(now, self._waiting.popleft())
        self._plan(now)

    def _request(self, now: float, answer: Answer) -> None:
        """The next turn of an answer."""
        if answer.dead:
            return
        replica = answer.replica
        if replica is None or not replica.is_up:
            replica = self._least_busy.pick()
            if replica is None:
                self._waiting.append(answer)
                return
            moved, answer.replica = answer.turn > 0, replica
            read_s = answer.cost.prompt_tokens * self._read_s + answer.turn * self._observation_s
            if moved:  # what it wrote so far has to be read as well
                read_s += sum(answer.cost.turn_tokens[: answer.turn]) * self._read_s
        else:
            read_s = self._observation_s
        if not replica.open:
            replica.open_since = now
        self._least_busy.one_more(replica)
        replica.begin(now, answer, read_s)
        self._touched[replica] = None

    def _close(self, now: float, replica: Replica) -> None:
        """A request is over."""
        if replica.open == 1:
            replica.open_s += now - replica.open_since
        self._least_busy.one_less(replica)

    def _check(self, now: float, replica: Replica) -> None:
        """Hand on what a replica has finished."""
        if now < replica.wake_at - TICK_S:
            return  # it has been woken since, and this is what was planned before
        replica.wake_at = math.inf
        for answer in replica.finished(now):
            self._close(now, replica)
            answer.turn += 1
            if answer.turn < len(answer.cost.turn_tokens):
                self._later(now + answer.cost.tool_s[answer.turn - 1], self._request, answer)
            else:
                answer.last = replica.version
                self._score(now, answer)
        self._touched[replica] = None

    def _score(self, now: float, answer: Answer) -> None:
        group = answer.group
        scored_at = now + answer.cost.reward_s
        if scored_at > group.scored_at:
            group.scored_at = scored_at
        group.left -= 1
        if not group.left:
            self._later(group.scored_at, self._finish, group)

    def _finish(self, now: float, group: Group) -> None:
        """Tell whoever waits for it, who may then ask for more: the engines go on after that."""
        self._loop.call_at(now, _settle, group.done)
        self._handed_over = True

    def _give_up(self, group: Group) -> None:
        now = self._loop.time()
        for answer in group.answers:
            runs = answer.replica is not None and answer.last < 0 and self._is_open(answer)
            answer.dead = True
            if runs:
                assert answer.replica is not None
                answer.replica.forget(now, answer)
                self._close(now, answer.replica)
                self._touched[answer.replica] = None
        self._plan(now)

    def _is_open(self, answer: Answer) -> bool:
        """Is it with its replica, and not with a tool?"""
        replica = answer.replica
        assert replica is not None
        return any(one is answer for _, _, one in replica.heap) or any(
            one is answer for _, one in replica.queue
        )

    # Time.

    def _later(self, at: float, what: Callable[[float, Any], None], subject: Any) -> None:
        heappush(self._heap, (at, next(self._order), what, subject))

    def _plan(self, now: float) -> None:
        """When each replica that something happened to is to be looked at next."""
        for replica in self._touched:
            at = replica.next_at(now) if replica.is_up else math.inf
            # An answer that came slows the others down: what is planned is then early, which costs one look.
            if at < replica.wake_at:
                replica.wake_at = at
                self._later(at, self._check, replica)
        self._touched.clear()

    def _go_on(self, until: float) -> None:
        """All events in their order, but none after `until` or after the end of a group."""
        self._handed_over = False
        while self._heap and self._heap[0][0] <= until and not self._handed_over:
            now, _, what, subject = heappop(self._heap)
            self.events += 1
            what(now, subject)
            self._plan(now)


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
