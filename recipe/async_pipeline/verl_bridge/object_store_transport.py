# SPDX-License-Identifier: Apache-2.0
"""Transfer buckets to replicas on other hosts through Ray's object store.

A courier on the trainer's host maps the trainer's arenas, so the trainer and its devices are not
involved. It puts each bucket into the object store once, regardless of the number of replicas; Ray
transfers it between hosts. The actor's process imports this module, so it imports neither verl nor vllm.
"""

from __future__ import annotations

from typing import Any

import ray

from ..weight_sync.arena import ArenaReader
from ..weight_sync.board import await_manifest
from ..weight_sync.manifest import Manifest, Ticket, decode, encode
from ..weight_sync.receiver import Fetch, header_of


class Courier:
    """The actor that offers buckets. Keeps one version at a time."""

    def __init__(self) -> None:
        self._reader = ArenaReader()
        self._version: int | None = None
        self._offered: dict[int, ray.ObjectRef[Any]] = {}

    def announced(self, ticket: Ticket, timeout_s: float) -> bytes:
        """Return the encoded manifest once the trainer has posted it.

        Raises WeightSyncError if `await_manifest` does.
        """
        return encode(await_manifest(ticket, timeout_s))

    def offer(self, manifest: bytes, sequence: int, fresh: bool) -> list[ray.ObjectRef[Any]]:
        """Return a list with a reference to the header and bytes of a bucket.

        `fresh` copies the bucket again, after a failed transfer.
        """
        described = decode(manifest)
        if described.version != self._version:
            self._version, self._offered = described.version, {}
        if fresh or sequence not in self._offered:
            self._offered[sequence] = ray.put(
                (header_of(described, sequence), self._bytes(described, sequence))
            )
        # Ray resolves a reference that is returned directly, but not one in a list.
        return [self._offered[sequence]]

    def _bytes(self, described: Manifest, sequence: int) -> Any:
        return self._reader.bucket(described, sequence).numpy()


def start_on(node: str) -> Any:
    """Start a courier on a Ray node and return its handle."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Courier).options(num_cpus=0, scheduling_strategy=strategy).remote()


def pull_through(courier: Any, manifest: bytes) -> Fetch:
    """Return a function with which an `Inbox` fetches the buckets of a version."""
    requested: set[int] = set()

    async def fetch(sequence: int) -> tuple[bytes, Any]:
        (bucket,) = await courier.offer.remote(manifest, sequence, sequence in requested)
        requested.add(sequence)
        header, payload = await bucket
        return header, payload

    return fetch
