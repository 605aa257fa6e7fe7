# SPDX-License-Identifier: Apache-2.0
"""Replicas ordered by their number of open requests."""

from __future__ import annotations

from collections.abc import Sequence

from .replica import Replica


class LeastBusy:
    """Buckets of replicas by their number of open requests; every operation is O(1).

    Correct because a number changes by one at a time.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._buckets: list[list[Replica]] = [[]]
        self._fewest = 0
        for replica in reversed(replicas):
            self.add(replica)

    def pick(self) -> Replica | None:
        """Return a replica with the fewest open requests, or None if there is no replica."""
        while self._fewest < len(self._buckets) and not self._buckets[self._fewest]:
            self._fewest += 1
        return self._buckets[self._fewest][-1] if self._fewest < len(self._buckets) else None

    def add(self, replica: Replica) -> None:
        """Add a replica."""
        while len(self._buckets) <= replica.open + 1:
            self._buckets.append([])
        self._put(replica)

    def remove(self, replica: Replica) -> None:
        """Remove a replica."""
        bucket = self._buckets[replica.open]
        last = bucket.pop()
        if last is not replica:
            bucket[replica.place] = last
            last.place = replica.place

    def one_more(self, replica: Replica) -> None:
        """Count one more open request of a replica."""
        buckets, open_before = self._buckets, replica.open
        # As `remove` and `_put`, written out: every turn of every response comes here.
        bucket = buckets[open_before]
        last = bucket.pop()
        if last is not replica:
            bucket[replica.place] = last
            last.place = replica.place

        replica.open = open_before + 1
        if replica.open >= len(buckets):
            buckets.append([])
        bucket = buckets[replica.open]
        replica.place = len(bucket)
        bucket.append(replica)

    def one_less(self, replica: Replica) -> None:
        """Count one less open request of a replica."""
        buckets, open_before = self._buckets, replica.open
        bucket = buckets[open_before]
        last = bucket.pop()
        if last is not replica:
            bucket[replica.place] = last
            last.place = replica.place

        replica.open = open_before - 1
        bucket = buckets[replica.open]
        replica.place = len(bucket)
        bucket.append(replica)
        if replica.open < self._fewest:
            self._fewest = replica.open

    def _put(self, replica: Replica) -> None:
        bucket = self._buckets[replica.open]
        replica.place = len(bucket)
        bucket.append(replica)
        if replica.open < self._fewest:
            self._fewest = replica.open
