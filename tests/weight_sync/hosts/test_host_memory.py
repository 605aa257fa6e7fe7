# SPDX-License-Identifier: Apache-2.0
"""A host receives and checks a version once, for all of its processes, and keeps two of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import CorruptionError, WaitTimeout, WeightSyncError
from recipe.async_pipeline.weight_sync.hosts import host_memory
from recipe.async_pipeline.weight_sync.hosts.host_memory import HostMemory, VersionRequest
from recipe.async_pipeline.weight_sync.hosts.host_slots import Reader, runs, this_process
from recipe.async_pipeline.weight_sync.hosts.receiver import ATTEMPTS, BucketVerdict
from recipe.async_pipeline.weight_sync.hosts.shares import Bucket
from recipe.async_pipeline.weight_sync.hosts.transport import Relayed, header_of, parent_of, tree
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest, WeightTicket
from recipe.async_pipeline.weight_sync.memory.segment import Segment
from recipe.async_pipeline.weight_sync.memory.segment_names import PREFIX, SHM_DIR
from tests import HANG_S
from tests.fakes.buckets import SIZES, manifest, payload, read, whole

FIRST, SECOND, THIRD = (Reader(f"replica {i}", os.getpid(), 0.0) for i in range(3))
Spoil = Callable[[Bucket, int, bytes], bytes]


def ticket(version: int, host: str = "trainer") -> WeightTicket:
    return WeightTicket(version=version, board="b", pid=os.getpid(), num_bytes=8, gather_s=0.0, host=host)


class Trainer:
    """A transport from a trainer's host; counts its buckets."""

    def __init__(self, version: int, spoil: Spoil = lambda bucket, attempt, data: data) -> None:
        self.version, self.spoil = version, spoil
        self.sent: Counter[Bucket] = Counter()
        self.open = asyncio.Event()
        self.open.set()

    async def announced(self) -> Manifest:
        return manifest(self.version)

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        self.sent[bucket] += 1
        await self.open.wait()
        data = payload(self.version, bucket.sequence, SIZES[bucket.sequence])
        return header_of(manifest(self.version), bucket.sequence), self.spoil(bucket, attempt, data)


def request(trainer: Trainer, timeout_s: float = HANG_S) -> VersionRequest:
    return VersionRequest(ticket(trainer.version), [trainer], timeout_s)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not list(SHM_DIR.glob(f"{PREFIX}*-{os.getpid()}-*"))


@asynccontextmanager
async def fresh_memory(alive: Callable[[Reader], bool] = lambda reader: True) -> AsyncIterator[HostMemory]:
    memory = HostMemory("here", alive)
    try:
        yield memory
    finally:
        await memory.close()


# Receiving.


async def test_any_number_of_processes_get_a_version_that_travels_once() -> None:
    async with fresh_memory() as memory:
        trainer = Trainer(1)
        trainer.open.clear()
        pending = [asyncio.ensure_future(memory.fetch(request(trainer), r)) for r in (FIRST, SECOND)]
        await asyncio.sleep(0)
        trainer.open.set()
        first, second = await asyncio.gather(*pending)
        third = await memory.fetch(request(trainer), THIRD)
        assert first == second == third and read(first) == whole(1)
        assert set(trainer.sent.values()) == {1} and len(trainer.sent) == len(SIZES)
        assert memory.status().received == 1


async def test_two_versions_are_kept_in_the_memory_of_two() -> None:
    async with fresh_memory() as memory:
        for version in range(5):
            for reader in (FIRST, SECOND):
                local = await memory.fetch(request(Trainer(version)), reader)
                assert read(local) == whole(version)
        status = memory.status()
        assert status.versions == [3, 4] and status.received == 5
        assert status.num_bytes == 2 * sum(SIZES)
        assert status.verdicts == {BucketVerdict.ACCEPTED: 5 * len(SIZES)}


async def test_a_version_that_is_read_is_not_overwritten_until_it_is_released() -> None:
    async with fresh_memory() as memory:
        old = await memory.fetch(request(Trainer(1)), FIRST)
        await memory.fetch(request(Trainer(2)), SECOND)
        waiting = asyncio.ensure_future(memory.fetch(request(Trainer(3)), SECOND))
        await asyncio.wait({waiting}, timeout=3 * host_memory.LEASE_POLL_S)
        assert not waiting.done() and read(old) == whole(1)
        memory.release(FIRST, 1)
        assert read(await waiting) == whole(3)


async def test_a_reader_that_does_not_finish_is_named() -> None:
    async with fresh_memory() as memory:
        await memory.fetch(request(Trainer(1)), FIRST)
        await memory.fetch(request(Trainer(2)), SECOND)
        with pytest.raises(WaitTimeout, match=r"versions being read: \{1: \['replica 0'\]\}"):
            await memory.fetch(request(Trainer(3), timeout_s=0.3), SECOND)
        memory.release(FIRST, 1)
        assert read(await memory.fetch(request(Trainer(3)), SECOND)) == whole(3)


def test_the_lease_of_a_dead_process_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    reader = Reader("replica 0", process.pid, psutil.Process(process.pid).create_time())

    async def main() -> None:
        async with fresh_memory(runs) as memory:
            await memory.fetch(request(Trainer(1)), reader)
            await memory.fetch(request(Trainer(2)), SECOND)
            waiting = asyncio.ensure_future(memory.fetch(request(Trainer(3)), SECOND))
            await asyncio.wait({waiting}, timeout=2 * host_memory.LEASE_POLL_S)
            assert not waiting.done()
            process.kill()  # It stays a zombie.
            assert read(await waiting) == whole(3)

    try:
        asyncio.run(main())
    finally:
        process.communicate()
    assert not runs(reader)
    mine = this_process("a test")
    assert runs(mine)
    assert not runs(Reader("of a reused process id", os.getpid(), mine.started - 1e3))


async def test_a_failed_version_leaves_the_others_and_can_be_requested_again() -> None:
    async with fresh_memory() as memory:
        kept = await memory.fetch(request(Trainer(1)), FIRST)
        broken = Trainer(2, lambda bucket, attempt, data: bytes(len(data)))
        with pytest.raises(
            WeightSyncError, match=rf"was requested {ATTEMPTS} times; the last copy was corrupt"
        ):
            await memory.fetch(request(broken), SECOND)
        assert read(kept) == whole(1) and memory.status().versions == [1]
        assert read(await memory.fetch(request(Trainer(2)), SECOND)) == whole(2)


async def test_the_work_continues_if_the_process_that_asked_for_it_dies() -> None:
    async with fresh_memory() as memory:
        trainer = Trainer(1)
        trainer.open.clear()
        dying = asyncio.ensure_future(memory.fetch(request(trainer), FIRST))
        waiting = asyncio.ensure_future(memory.fetch(request(trainer), SECOND))
        await asyncio.sleep(0)
        dying.cancel()
        trainer.open.set()
        assert read(await waiting) == whole(1)
        assert set(trainer.sent.values()) == {1}


# The trainer's host.


async def test_the_trainers_host_maps_its_memory_and_checks_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    checksum = Segment.checksum

    def counted(segment: Segment, nbytes: int) -> int:
        checked.append(segment.name)
        return checksum(segment, nbytes)

    async with fresh_memory() as memory:
        writer = ArenaWriter(4096, 2, None)
        try:
            for version in range(3):
                values = torch.full((3000,), float(version))
                gathered = writer.gather(version, [("w", values), ("b", values + 1)])
                on_host = msgspec.structs.replace(gathered, host="here")
                await asyncio.to_thread(await_manifest, on_host, HANG_S)
                monkeypatch.setattr(Segment, "checksum", counted)
                wanted = VersionRequest(on_host, [Trainer(version)], HANG_S)
                found = [await memory.fetch(wanted, reader) for reader in (FIRST, SECOND)]
                monkeypatch.undo()
                assert found[0] == found[1]
                assert sorted(checked) == sorted(bucket.segment for bucket in found[0].buckets)
                checked.clear()
        finally:
            writer.close()
        assert memory.status().num_bytes == 0


async def test_a_bucket_that_stays_corrupt_on_the_trainers_host_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "READ_AGAIN_S", 0.0)

    async with fresh_memory() as memory:
        writer = ArenaWriter(4096, 2, None)
        try:
            on_host = msgspec.structs.replace(writer.gather(0, [("w", torch.ones(9))]), host="here")
            found = await asyncio.to_thread(await_manifest, on_host, HANG_S)
            segment = Segment(found.buckets[0].segment, 36, create=False)
            segment.bytes[3] ^= 1
            with pytest.raises(CorruptionError, match="is corrupt"):
                await memory.fetch(VersionRequest(on_host, [Trainer(0)], HANG_S), FIRST)
            segment.bytes[3] ^= 1
            await memory.fetch(VersionRequest(on_host, [Trainer(0)], HANG_S), FIRST)
            segment.close()
        finally:
            writer.close()


def test_reading_again_helps_if_the_bytes_are_right_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "READ_AGAIN_S", 0.0)
    errors = [CorruptionError("once"), CorruptionError("twice")]

    def verify() -> None:
        if errors:
            raise errors.pop()

    asyncio.run(host_memory.checked(verify))
    assert errors == []


# Relays.


class Host:
    """A host of a tree: its memory, and what it does to buckets that it sends."""

    def __init__(self, name: str) -> None:
        self.name, self.memory = name, HostMemory(name, lambda reader: True)
        self.sent = 0
        self.dies_after: int | None = None
        self.flips: set[int] = set()


class Link:
    """The transport from one host of a tree to another."""

    def __init__(self, hosts: dict[str, Host], origin: Trainer, names: tuple[str, ...], source: str) -> None:
        self.hosts, self.origin, self.names, self.source = hosts, origin, names, source

    async def announced(self) -> Manifest:
        return await self.origin.announced()

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        if self.source == self.names[0]:
            return await self.origin.bucket(bucket, attempt)
        host = self.hosts[self.source]
        if host.dies_after is not None and host.sent >= host.dies_after:
            raise WeightSyncError(f"{host.name} is gone")
        host.sent += 1
        async with host.memory.lend(wanted(self.hosts, self.origin, self.names, self.source), bucket) as lent:
            header, data = lent
            if host.sent in host.flips:
                data = bytes([data[0] ^ 1, *bytes(data)[1:]])
            return header, bytes(data)


def wanted(hosts: dict[str, Host], origin: Trainer, names: tuple[str, ...], host: str) -> VersionRequest:
    parent = parent_of(names, host)
    root = Link(hosts, origin, names, names[0])
    relay = None if parent in (None, names[0]) else Link(hosts, origin, names, str(parent))
    return VersionRequest(ticket(origin.version, names[0]), [Relayed(root, relay)], HANG_S)


async def distributed(
    receivers: list[Host], asked: list[str], versions: int = 1
) -> tuple[list[Trainer], dict[str, Host]]:
    hosts = {host.name: host for host in receivers}
    names = tree("trainer", tuple(hosts))
    trainers = [Trainer(version) for version in range(versions)]
    try:
        for trainer in trainers:
            found = await asyncio.gather(
                *(hosts[name].memory.fetch(wanted(hosts, trainer, names, name), FIRST) for name in asked)
            )
            assert all(read(local) == whole(trainer.version) for local in found)
    finally:
        for host in receivers:
            await host.memory.close()
    return trainers, hosts


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_the_trainers_host_sends_each_bucket_to_at_most_two_hosts(number: int) -> None:
    names = [f"host {i}" for i in range(number)]
    trainers, _ = asyncio.run(distributed([Host(name) for name in names], names, versions=3))
    for trainer in trainers:
        assert set(trainer.sent.values()) == {min(number, 2)}


def test_a_relay_without_consumers_begins_to_receive() -> None:
    names = [f"host {i}" for i in range(3)]
    trainers, hosts = asyncio.run(distributed([Host(name) for name in names], ["host 2"]))
    assert set(trainers[0].sent.values()) == {1}
    assert hosts["host 0"].memory.status().received == 1
    assert hosts["host 1"].memory.status().received == 0


@pytest.mark.slow
@settings(deadline=None, database=None, derandomize=True, max_examples=40)
@given(data=st.data())
def test_every_host_gets_every_version_if_relays_fail(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 6))
    receivers = [Host(f"host {i}") for i in range(number)]
    for host in receivers:
        host.dies_after = data.draw(st.none() | st.integers(0, 2 * len(SIZES)))
        host.flips = data.draw(st.sets(st.integers(1, 4 * len(SIZES))))
    asyncio.run(distributed(receivers, [host.name for host in receivers], versions=3))


async def test_a_version_that_is_sent_is_not_overwritten_meanwhile() -> None:
    async with fresh_memory() as memory:
        for version in (1, 2):
            await memory.fetch(request(Trainer(version)), FIRST)
        memory.release(FIRST, 2)
        async with memory.lend(request(Trainer(1)), Bucket(0, 0)) as (_, data):
            waiting = asyncio.ensure_future(memory.fetch(request(Trainer(3)), SECOND))
            await asyncio.wait({waiting}, timeout=2 * host_memory.LEASE_POLL_S)
            assert not waiting.done() and bytes(data) == payload(1, 0, SIZES[0])
        await waiting


async def test_a_bucket_that_does_not_exist_is_an_error() -> None:
    async with fresh_memory() as memory:
        with pytest.raises(WeightSyncError, match="v1 has no bucket 9 of share 0"):
            async with memory.lend(request(Trainer(1)), Bucket(0, 9)):
                pass
