# SPDX-License-Identifier: Apache-2.0
"""A host gets a version as the difference from the one that it has, and whole whenever that fails."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from recipe.async_pipeline.weight_sync.hosts.delta import KEPT, Differences, difference
from recipe.async_pipeline.weight_sync.hosts.host_memory import HostMemory, VersionRequest
from recipe.async_pipeline.weight_sync.hosts.host_slots import Reader
from recipe.async_pipeline.weight_sync.hosts.receiver import BucketVerdict, Incoming
from recipe.async_pipeline.weight_sync.hosts.shares import Bucket
from recipe.async_pipeline.weight_sync.hosts.transport import Header
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import BucketEntry, Manifest, WeightTicket
from recipe.async_pipeline.weight_sync.memory.segment_names import PREFIX, SHM_DIR
from tests import HANG_S

READER = Reader("replica 0", os.getpid(), 0.0)
BUCKETS = 3
MAKE = "recipe.async_pipeline.weight_sync.hosts.delta.difference"


class Link:
    """A transport that has another host lend buckets, and counts what travels."""

    def __init__(
        self, sender: HostMemory, asks: Callable[[WeightTicket], VersionRequest], ticket: WeightTicket
    ) -> None:
        self._sender, self.asks, self._ticket = sender, asks, ticket
        self.sent: list[tuple[int | None, int]] = []
        """The base and the bytes of each bucket."""
        self.spoil: Callable[[bytes], bytes] = lambda data: data

    async def announced(self) -> Manifest:
        return await asyncio.to_thread(await_manifest, self._ticket, HANG_S)

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        async with self._sender.lend(self.asks(self._ticket), bucket, base) as (header, payload):
            data = bytes(payload)
        found = msgspec.msgpack.decode(header, type=Header).base
        self.sent.append((found, len(data)))
        return header, self.spoil(data) if found is not None else data


class Hosts:
    """A trainer that changes a few values of each version, its host, and a host that receives."""

    def __init__(self) -> None:
        self.writer = ArenaWriter(8192, 4, torch.bfloat16)
        self.weights = {f"w{i}": torch.randn(4096) for i in range(BUCKETS)}
        self.trainer, self.here, self.leaf = (HostMemory(name, lambda r: True) for name in ("t", "h", "l"))

    def publish(self, version: int) -> WeightTicket:
        for values in self.weights.values():
            values[version::1000] += 1
        ticket = self.writer.gather(version, self.weights.items())
        return msgspec.structs.replace(ticket, host="t")

    async def receive(self, ticket: WeightTicket, link: Link | None = None, *, delta: bool = True) -> Link:
        """Receive a version, and require the trainer's values."""
        link = link or Link(self.trainer, lambda asked: VersionRequest(asked, [], HANG_S), ticket)
        link.asks = lambda asked: VersionRequest(asked, [link], HANG_S)
        await self._receive(self.here, ticket, link, delta)
        return link

    async def relay(self, ticket: WeightTicket, below: Link) -> Link:
        """Receive a version from the host that received it from the trainer."""
        link = Link(self.here, lambda asked: VersionRequest(asked, [below], HANG_S), ticket)
        await self._receive(self.leaf, ticket, link, True)
        return link

    async def _receive(self, memory: HostMemory, ticket: WeightTicket, link: Link, delta: bool) -> None:
        local = await memory.fetch(VersionRequest(ticket, [link], HANG_S, delta), READER)
        memory.release(READER, ticket.version)
        reader = ArenaReader()
        reader.verify(local)
        for name, values in reader.tensors(local).items():
            assert torch.equal(values, self.weights[name].bfloat16())

    async def close(self) -> None:
        for memory in (self.trainer, self.here, self.leaf):
            await memory.close()
        self.writer.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not list(SHM_DIR.glob(f"{PREFIX}*-{os.getpid()}-*"))


@asynccontextmanager
async def fresh_hosts() -> AsyncIterator[Hosts]:
    torch.manual_seed(0)
    hosts = Hosts()
    try:
        yield hosts
    finally:
        await hosts.close()


async def test_later_versions_travel_as_differences() -> None:
    async with fresh_hosts() as hosts:
        first = await hosts.receive(hosts.publish(0))
        assert first.sent == [(None, 8192)] * BUCKETS
        for version in (1, 2, 3):
            link = await hosts.receive(hosts.publish(version))
            assert [base for base, _ in link.sent] == [version - 1] * BUCKETS
            assert all(size < 300 for _, size in link.sent)


async def test_a_relay_makes_differences_too() -> None:
    async with fresh_hosts() as hosts:
        for version in (0, 1):
            ticket = hosts.publish(version)
            link = await hosts.relay(ticket, await hosts.receive(ticket))
        assert [base for base, _ in link.sent] == [0] * BUCKETS


async def test_a_host_that_missed_a_version_gets_the_next_one_whole() -> None:
    async with fresh_hosts() as hosts:
        await hosts.receive(hosts.publish(0))
        hosts.publish(1)
        link = await hosts.receive(hosts.publish(2))
        assert link.sent == [(None, 8192)] * BUCKETS, "version 2 took the memory of version 0"


async def test_a_run_without_the_knob_asks_for_no_difference() -> None:
    async with fresh_hosts() as hosts:
        for version in (0, 1):
            link = await hosts.receive(hosts.publish(version), delta=False)
            assert link.sent == [(None, 8192)] * BUCKETS


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: b"", lambda data: b"\xff" + data])
async def test_a_damaged_difference_is_replaced_by_the_whole_bucket(spoil: Callable[[bytes], bytes]) -> None:
    async with fresh_hosts() as hosts:
        await hosts.receive(hosts.publish(0))
        ticket = hosts.publish(1)
        link = Link(hosts.trainer, lambda asked: VersionRequest(asked, [], HANG_S), ticket)
        link.spoil = spoil
        await hosts.receive(ticket, link)
        assert sorted(base is None for base, _ in link.sent) == [False] * BUCKETS + [True] * BUCKETS
        assert hosts.here.status().verdicts[BucketVerdict.TRUNCATED] == BUCKETS


async def test_a_base_that_was_overwritten_is_found_by_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the trainer gathered the next version into that arena while the difference was made."""

    async with fresh_hosts() as hosts:
        await hosts.receive(hosts.publish(0))
        monkeypatch.setattr(MAKE, lambda old, new, item: difference(old ^ 1, new, item))
        link = await hosts.receive(hosts.publish(1))
        assert [base for base, _ in link.sent].count(None) == BUCKETS
        assert hosts.here.status().verdicts[BucketVerdict.CORRUPT] == BUCKETS


async def test_versions_without_anything_in_common_travel_whole() -> None:
    async with fresh_hosts() as hosts:
        await hosts.receive(hosts.publish(0))
        hosts.weights = {name: torch.randn(4096) for name in hosts.weights}
        link = await hosts.receive(hosts.publish(1))
        assert link.sent == [(None, 8192)] * BUCKETS


async def test_each_difference_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    async with fresh_hosts() as hosts:
        await hosts.receive(hosts.publish(0))

        def count(old: Any, new: Any, item: int) -> bytes | None:
            made.append(item)
            return difference(old, new, item)

        monkeypatch.setattr(MAKE, count)
        ticket = hosts.publish(1)
        link = await hosts.receive(ticket)
        await asyncio.gather(*(link.bucket(Bucket(0, index), 0, 0) for index in range(BUCKETS)))
        assert made == [2] * BUCKETS, "of the size of bfloat16"


async def test_a_difference_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fresh_hosts() as hosts:
        await hosts.receive(hosts.publish(0))
        ticket = hosts.publish(1)
        link = Link(hosts.trainer, lambda asked: VersionRequest(asked, [link], HANG_S), ticket)

        def fail(*arguments: Any) -> bytes | None:
            raise MemoryError("no memory for a difference")

        with monkeypatch.context() as patched:
            patched.setattr(MAKE, fail)
            with pytest.raises(MemoryError):
                await link.bucket(Bucket(0, 0), 0, 0)
        await link.bucket(Bucket(0, 0), 0, 0)
        assert [base for base, _ in link.sent] == [0]


def test_announced_versions_are_remembered_as_long_as_their_memory_lasts() -> None:
    differences = Differences()
    for version in range(5):
        bucket = BucketEntry(f"segment {version}", 8, 0)
        differences.announced(0, Manifest(version=version, tensors=(), buckets=(bucket,), samples=()))
    reader: Any = SimpleNamespace(bucket=lambda found, sequence: torch.zeros(8))
    known = [v for v in range(4) if differences.mapped(reader, v, 4, Bucket(0, 0)) is not None]
    assert known == [*range(5 - KEPT, 4)]


async def test_the_differences_of_older_versions_are_dropped() -> None:
    async with fresh_hosts() as hosts:
        for version in range(3):
            await hosts.receive(hosts.publish(version))
        assert {version for version, _, _ in hosts.trainer._differences._coded} == {2}


async def test_buckets_are_put_together_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With joined shares they are copied block by block, which would hold up all other requests."""
    loops: list[bool] = []
    payload = Incoming.payload

    def watched(incoming: Incoming, bucket: Bucket) -> Any:
        loops.append(threading.current_thread() is threading.main_thread())
        return payload(incoming, bucket)

    monkeypatch.setattr(Incoming, "payload", watched)

    async with fresh_hosts() as hosts:
        for version in (0, 1):
            ticket = hosts.publish(version)
            await hosts.relay(ticket, await hosts.receive(ticket))
    # Version 0 is lent; of version 1, two hosts restore it, and one lends it as a difference.
    assert loops == [False] * (BUCKETS + 2 * BUCKETS + 2 * BUCKETS)
