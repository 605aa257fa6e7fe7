# SPDX-License-Identifier: Apache-2.0
"""Which replica answers a request, decided where the request is made.

verl asks an actor, twice for each turn of each answer, and gets a handle of the replica to unpack. Agent loop
workers that each keep their own requests even keep them even together.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from cachetools import LRUCache

REMEMBERED = 10_000
"""Requests whose replica is remembered, for their later turns."""


class Router:
    """verl's default rule: the turns of a request go to one replica, the first of them to the least busy
    one.
    """

    def __init__(self, choose: Callable[[list[str]], str] = random.choice) -> None:
        """`choose`: among replicas that are equally busy."""
        self._servers: Mapping[str, Any] = {}
        self._open: Counter[str] = Counter()
        self._of_request: LRUCache[str, str] = LRUCache(REMEMBERED)
        self._choose = choose

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(self._servers)

    def update(self, servers: Mapping[str, Any]) -> None:
        """The replicas that there are now, by name."""
        self._servers = dict(servers)

    def remove(self, server: str) -> None:
        """A replica is gone; `update` may bring it back."""
        self._servers = {name: handle for name, handle in self._servers.items() if name != server}

    def acquire(self, request_id: str) -> tuple[str, Any] | None:
        """Name and handle of the replica for the next turn of a request; None: there is no replica."""
        if not self._servers:
            return None
        server = self._of_request.get(request_id)
        if server is None or server not in self._servers:
            fewest = min(self._open[name] for name in self._servers)
            server = self._choose([name for name in self._servers if self._open[name] == fewest])
            self._of_request[request_id] = server
        self._open[server] += 1
        return server, self._servers[server]

    def release(self, server: str) -> None:
        """A turn is over."""
        if self._open[server] <= 1:
            del self._open[server]
        else:
            self._open[server] -= 1


def servers_of(balancer: Any) -> dict[str, Any] | None:
    """Runs in verl's balancer: its replicas, or None if it decides in another way than by default."""
    by_default = type(balancer).__name__ == "GlobalRequestLoadBalancer" and not balancer._full_determinism
    return dict(balancer._servers) if by_default else None
