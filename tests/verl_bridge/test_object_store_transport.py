# SPDX-License-Identifier: Apache-2.0
"""Buckets are transferred between Ray nodes through the object store; with real Ray and two nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
import xxhash
from ray.cluster_utils import Cluster

from recipe.async_pipeline.verl_bridge.object_store_transport import pull_through, start_on
from recipe.async_pipeline.weight_sync.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.board import await_manifest
from recipe.async_pipeline.weight_sync.manifest import decode, encode
from recipe.async_pipeline.weight_sync.receiver import Inbox, Verdict, header_of

pytestmark = pytest.mark.real_engine
BUCKET_BYTES = 1 << 20
WEIGHTS = {
    f"layer.{i}.weight": torch.randn(300, 300, generator=torch.Generator().manual_seed(i)) for i in range(9)
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    """Yield Ray's ids of the trainer's and a replica's node, which have separate object stores."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster.head_node.node_id, other.node_id
    finally:
        ray.shutdown()
        cluster.shutdown()


class Replica:
    """The receiving half of a rollout server."""

    def __init__(self) -> None:
        self.inbox = Inbox()

    async def load(
        self, manifest: bytes, courier: Any, spoil: int | None
    ) -> tuple[dict[str, float], list[str]]:
        """Return the sums of the received tensors, and the verdicts about buckets.

        `spoil` is the number of a bucket whose first transfer is truncated.
        """
        pull = pull_through(courier, manifest)
        pulled: list[int] = []

        async def fetch(sequence: int) -> tuple[bytes, Any]:
            header, payload = await pull(sequence)
            pulled.append(sequence)
            truncated = sequence == spoil and pulled.count(sequence) == 1
            return header, payload[:-1] if truncated else payload

        local = await self.inbox.receive(decode(manifest), fetch)
        reader = ArenaReader()
        sums = {
            name: float(t.double().sum()) for piece in reader.read(local, BUCKET_BYTES) for name, t in piece
        }
        return sums, sorted(verdict.value for verdict in self.inbox.verdicts.elements())

    def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node


def test_a_version_arrives_complete_on_another_node(nodes: tuple[str, str]) -> None:
    here, there = nodes
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(there, soft=False)
    replica: Any = ray.remote(Replica).options(num_cpus=0, scheduling_strategy=strategy).remote()
    assert ray.get(replica.node.remote()) == there != here

    courier = start_on(here)
    writer = ArenaWriter(BUCKET_BYTES, 4, None)
    try:
        for version in range(3):
            weights = {name: tensor + version for name, tensor in WEIGHTS.items()}
            ticket = writer.gather(version, weights.items())
            manifest = ray.get(courier.announced.remote(ticket, 30.0))
            buckets = len(decode(manifest).buckets)
            assert buckets > 2

            spoil = 1 if version == 1 else None
            sums, verdicts = ray.get(replica.load.remote(manifest, courier, spoil))
            assert sums == {name: float(t.double().sum()) for name, t in weights.items()}
        assert verdicts == ["accepted"] * (3 * buckets) + [Verdict.TRUNCATED.value]
    finally:
        writer.close()


def test_replicas_pull_the_same_copy_and_a_failed_one_is_replaced(nodes: tuple[str, str]) -> None:
    courier = start_on(nodes[0])
    writer = ArenaWriter(BUCKET_BYTES, 4, None)
    try:
        manifest = encode(await_manifest(writer.gather(0, WEIGHTS.items()), 30))
        (first,), (second,), (fresh,) = ray.get(
            [courier.offer.remote(manifest, 0, f) for f in (False, False, True)]
        )
        assert first == second != fresh
        later = encode(await_manifest(writer.gather(1, WEIGHTS.items()), 30))
        (next_version,) = ray.get(courier.offer.remote(later, 0, False))
        assert next_version != fresh

        async def fetch() -> tuple[bytes, Any]:
            return await pull_through(courier, later)(2)

        header, payload = asyncio.run(fetch())
        bucket = decode(later).buckets[2]
        assert header == header_of(decode(later), 2)
        assert xxhash.xxh3_64_intdigest(payload) == bucket.xxh3
    finally:
        writer.close()
