# SPDX-License-Identifier: Apache-2.0
"""One rollout engine: continuous batching as processor sharing, in O(log n) per response, not per token.

Each step of an engine gives one token to every response that it works on, and takes `step_s(c)` with c of
them. All responses therefore progress equally, and it is enough to know the number of steps that a replica
has made since its start (its *virtual time*): a response of k tokens that starts at virtual time v is
finished at v + k, independent of other responses. Only the speed of virtual time changes: 1 / step_s(c),
and 0 while a prompt is read or weights are loaded. This is the virtual time of generalized processor
sharing (Parekh & Gallager, "A generalized processor sharing approach to flow control", 1993), with a
service rate that depends on the number of customers.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from .draws import ResponseCost

TICK_S = 1e-9
"""Times closer than this are equal; the resolution of the virtual loop."""


class Served(NamedTuple):
    """The versions that wrote a response."""

    first_version: int
    last_version: int
    spans: tuple[tuple[int, int], ...] = ()
    """As `core.groups.items.Trajectory.spans`, without the tokens of tools."""


class SimulatedResponse:
    """One response in progress."""

    __slots__ = (
        "cost",
        "dead",
        "first",
        "group",
        "index",
        "last",
        "replica",
        "spans",
        "started",
        "turn",
        "written",
    )

    def __init__(self, group: SimulatedGroup, index: int, cost: ResponseCost) -> None:
        self.group, self.index, self.cost = group, index, cost
        self.turn = self.written = 0
        """Finished turns, and the tokens that the model wrote in them."""
        self.replica: Replica | None = None
        self.dead = self.started = False
        self.first = self.last = -1
        self.spans: list[tuple[int, int]] = []


class SimulatedGroup:
    """The responses to one prompt; `done` is set when the last of them is scored."""

    __slots__ = ("responses", "done", "left", "scored_at")

    def __init__(self, costs: Sequence[ResponseCost]) -> None:
        self.responses = [SimulatedResponse(self, i, cost) for i, cost in enumerate(costs)]
        self.left = len(self.responses)
        self.scored_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Replica:
    """One engine. `begin`, `finished`, `forget` and `fail` first advance its virtual time to `now`."""

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
        "step_s",
        "wake_at",
        "version",
        "_order",
        "_slots",
    )

    def __init__(self, index: int, step_s: Sequence[float]) -> None:
        """`step_s[c]`: seconds of a step with c responses; its length limits how many run."""
        self.index, self.step_s, self._slots = index, step_s, len(step_s) - 1
        self.steps = self.at = self.frozen_until = 0.0
        self.heap: list[tuple[float, int, SimulatedResponse]] = []
        """Running responses by the virtual time at which they finish."""
        self._order = count()
        self.queue: deque[tuple[float, SimulatedResponse]] = deque()
        """Waiting responses, each with its seconds of reading."""
        self.running = self.open = self.place = 0
        self.open_s = self.open_since = 0.0
        self.wake_at = math.inf
        self.is_up = True
        self.version = -1

    def pass_to(self, now: float) -> None:
        """Advance virtual time to `now`."""
        if now <= self.at:
            return
        since = self.frozen_until if self.frozen_until > self.at else self.at
        if self.running and now > since:
            self.steps += (now - since) / self.step_s[self.running]
        self.at = now

    def freeze(self, now: float, seconds: float) -> None:
        """Make no step for `seconds`, after any freeze in progress."""
        self.pass_to(now)
        self.frozen_until = max(self.frozen_until, now) + seconds

    def serve(self, now: float, version: int) -> None:
        """Serve a version; running responses continue with it."""
        self.pass_to(now)
        self.version = version
        for end, _, response in self.heap:
            if not response.dead:
                left = math.ceil(end - self.steps - TICK_S)
                written = response.written + response.cost.turn_tokens[response.turn] - left
                response.spans.append((version, written))

    def begin(self, now: float, response: SimulatedResponse, read_s: float) -> None:
        """Start a turn, or queue it if all slots are taken."""
        # As `pass_to` and `_admit`, written out: every turn of a simulation comes here.
        frozen = self.frozen_until
        if now > self.at:
            since = frozen if frozen > self.at else self.at
            if self.running and now > since:
                self.steps += (now - since) / self.step_s[self.running]
            self.at = now

        if self.running >= self._slots:
            self.queue.append((read_s, response))
            return
        spans = response.spans
        if not (spans and spans[-1][0] == self.version and spans[-1][1] < response.written):
            self._note_version(response)
        if read_s:
            self.frozen_until = (frozen if frozen > now else now) + read_s
        self.running += 1
        heappush(
            self.heap, (self.steps + response.cost.turn_tokens[response.turn], next(self._order), response)
        )

    def finished(self, now: float) -> list[SimulatedResponse]:
        """Remove and return the responses whose turn is finished; queued ones take their slots."""
        # As `pass_to` and `next_at`, written out: this is the innermost loop of a simulation.
        since = self.frozen_until
        step_s = self.step_s
        if now > self.at:
            start = since if since > self.at else self.at
            if self.running and now > start:
                self.steps += (now - start) / step_s[self.running]
            self.at = now
        if now > since:
            since = now

        heap, by = self.heap, now + TICK_S
        done: list[SimulatedResponse] = []
        while heap:
            end, _, response = heap[0]
            if response.dead:
                heappop(heap)
                continue
            if since + (end - self.steps) * step_s[self.running] > by:
                break

            heappop(heap)
            if end > self.steps:
                self.steps = end
            self.running -= 1
            done.append(response)
            if self.queue:
                self._admit_queued(now)
                since = self.frozen_until if self.frozen_until > now else now
        return done

    def next_at(self, now: float) -> float:
        """Return when the next turn finishes if nothing changes, or infinity. Requires `pass_to(now)`."""
        heap = self.heap
        while heap and heap[0][2].dead:
            heappop(heap)
        if not heap:
            return math.inf
        since = self.frozen_until if self.frozen_until > now else now
        return since + (heap[0][0] - self.steps) * self.step_s[self.running]

    def forget(self, now: float, response: SimulatedResponse) -> None:
        """Remove a response that runs or waits here; it is marked as dead already."""
        self.pass_to(now)
        queued = len(self.queue)
        self.queue = deque(entry for entry in self.queue if entry[1] is not response)
        if len(self.queue) == queued:
            self.running -= 1
            self._admit_queued(now)

    def fail(self, now: float) -> list[SimulatedResponse]:
        """Stop; return all responses that ran or waited."""
        self.pass_to(now)
        lost = [response for _, _, response in self.heap if not response.dead] + [
            response for _, response in self.queue
        ]
        self.heap, self.queue = [], deque()
        self.running, self.is_up = 0, False
        self.frozen_until = now
        return lost

    def _admit_queued(self, now: float) -> None:
        while self.queue and self.running < self._slots:
            read_s, response = self.queue.popleft()
            self.begin(now, response, read_s)

    def _note_version(self, response: SimulatedResponse) -> None:
        """Record the version that writes the next token of a response, which starts a turn here."""
        if not response.started:
            response.started, response.first = True, self.version
        # What a failed replica wrote of this turn is lost.
        spans, written = response.spans, response.written
        while spans and spans[-1][1] >= written:
            spans.pop()
        if not spans or spans[-1][0] != self.version:
            spans.append((self.version, written))
