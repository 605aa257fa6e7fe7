# SPDX-License-Identifier: Apache-2.0
"""Choose the replica of a request where the request is made.

verl asks an actor twice for each turn of each response, and unpickles a replica's handle each time. If
each agent loop worker balances its own requests, all requests together are balanced too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from cachetools import LRUCache

REMEMBERED = 10_000
"""Number of requests whose replica is remembered for later turns."""


class Router:
    """verl's default rule: the first turn goes to the least busy replica, later turns to the same one."""

    def __init__(self, choose: Callable[[list[str]], str] = random.choice) -> None:
        """`choose` picks among equally busy replicas."""
        self._servers: Mapping[str, Any] = {}
        self._open: Counter[str] = Counter()
        self._of_request: LRUCache[str, str] = LRUCache(REMEMBERED)
        self._choose = choose

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(self._servers)

    def update(self, servers: Mapping[str, Any]) -> None:
        """Replace the list of replicas, by name."""
        self._servers = dict(servers)

    def remove(self, server: str) -> None:
        """Remove a replica; `update` may add it again."""
        self._servers = {name: handle for name, handle in self._servers.items() if name != server}

    def acquire(self, request_id: str) -> tuple[str, Any] | None:
        """Return name and handle of the replica for the next turn of a request, or None if there are
        none.
        """
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
        """Count a turn as finished."""
        if self._open[server] <= 1:
            del self._open[server]
        else:
            self._open[server] -= 1


def servers_of(balancer: Any) -> dict[str, Any] | None:
    """Return the balancer's replicas, or None if it does not use the default rule. Runs in its process."""
    by_default = type(balancer).__name__ == "GlobalRequestLoadBalancer" and not balancer._full_determinism
    return dict(balancer._servers) if by_default else None
