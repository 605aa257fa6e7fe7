# SPDX-License-Identifier: Apache-2.0
"""Choose the replica of a request where the request is made, and let requests wait there.

verl asks an actor twice for each turn of each response, and unpickles a replica's handle each time. If
each agent loop worker balances its own requests, all requests together are balanced too.

At most `share` requests of this worker are open on a replica (`config.derived.scheduling`). Further
requests wait here, not in the replica: here they can be cancelled, go to another replica that has room
first, and begin with newer weights.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from cachetools import LRUCache

REMEMBERED = 10_000
"""Number of requests whose replica is remembered for later turns."""
NamedReplica = tuple[str, Any]
"""Name and handle of a replica."""


class Router:
    """verl's default rule: the first turn goes to the least busy replica, later turns to the same one.

    A later turn whose replica has no room goes to another one that has: its prefix is computed again, but
    it never waits for one replica while another is free. If none has room, the requests that are due first go
    first; of those, the ones that had a replica before (later turns, and requests whose replica died), since
    their prefixes may still be cached; and then in the order of their arrival.
    """

    def __init__(self, share: int, choose: Callable[[list[str]], str] = random.choice) -> None:
        """`choose` picks among equally busy replicas."""
        self._share, self._choose = share, choose
        self._servers: Mapping[str, Any] = {}
        self._open: Counter[str] = Counter()
        self._of_request: LRUCache[str, str] = LRUCache(REMEMBERED)
        self._queue: list[tuple[int, bool, int, str, asyncio.Future[NamedReplica | None]]] = []
        """A heap of requests that wait, by the order in which they get room; some have given up."""
        self._waiting = set[asyncio.Future[NamedReplica | None]]()
        self._arrivals, self._newest = count(), 0

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(self._servers)

    @property
    def full(self) -> bool:
        """Whether the next request has to wait; without replicas, none waits."""
        return bool(self._servers) and min(self._open[name] for name in self._servers) >= self._share

    @property
    def waiting(self) -> int:
        """Number of requests that wait for room."""
        return len(self._waiting)

    def update(self, servers: Mapping[str, Any]) -> None:
        """Replace the list of replicas, by name."""
        self._servers = dict(servers)
        self._wake()

    def remove(self, server: str) -> None:
        """Remove a replica; `update` may add it again."""
        self.update({name: handle for name, handle in self._servers.items() if name != server})

    async def acquire(self, request_id: str, due: int | None = None) -> NamedReplica | None:
        """Return name and handle of the replica for the next turn of a request, or None if there are
        none.

        `due` grows with the step that trains it: the version at which its group was admitted. Without one, a
        request goes after the ones that wait, and before all that are due later than any of them.

        Waits for: room on any replica. Unblocked by: `release`, `update`. The deadline is the one of
        the stage `generate`, which waits for the group: a request may wait as long as the ones before it
        generate.
        """
        if not self._servers:
            return None
        if (place := self._place(request_id)) is not None:
            return place

        granted: asyncio.Future[NamedReplica | None] = asyncio.get_running_loop().create_future()
        due = self._newest if due is None else due
        self._newest = max(self._newest, due)
        is_new = request_id not in self._of_request
        heapq.heappush(self._queue, (due, is_new, next(self._arrivals), request_id, granted))
        self._waiting.add(granted)
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and (place := granted.result()) is not None:
                self.release(place[0])
            raise
        finally:
            self._waiting.discard(granted)

    def release(self, server: str) -> None:
        """Count a turn as finished."""
        if self._open[server] <= 1:
            del self._open[server]
        else:
            self._open[server] -= 1
        self._wake()

    def _place(self, request_id: str) -> NamedReplica | None:
        """Count a turn as begun and return its replica, or None if no replica has room."""
        server = self._of_request.get(request_id)
        if server is None or server not in self._servers or self._open[server] >= self._share:
            fewest = min(self._open[name] for name in self._servers)
            if fewest >= self._share:
                return None
            server = self._choose([name for name in self._servers if self._open[name] == fewest])
            self._of_request[request_id] = server
        self._open[server] += 1
        return server, self._servers[server]

    def _wake(self) -> None:
        """Give room to waiting requests; without replicas, let all of them return."""
        while self._queue:
            *_, request_id, granted = self._queue[0]
            if not granted.done():
                place = self._place(request_id) if self._servers else None
                if place is None and self._servers:
                    return
                granted.set_result(place)
            heapq.heappop(self._queue)
            self._waiting.discard(granted)


def servers_of(balancer: Any) -> dict[str, Any] | None:
    """Return the balancer's replicas, or None if it does not use the default rule. Runs in its process."""
    by_default = type(balancer).__name__ == "GlobalRequestLoadBalancer" and not balancer._full_determinism
    return dict(balancer._servers) if by_default else None
