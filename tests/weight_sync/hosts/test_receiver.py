# SPDX-License-Identifier: Apache-2.0
"""Buckets that come in any order, twice, broken or not at all: what can be read is whole, and stays so."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.hosts.receiver import (
    ATTEMPTS,
    IN_FLIGHT,
    BucketVerdict,
    Fetch,
    Incoming,
    Slot,
    receive,
)
from recipe.async_pipeline.weight_sync.hosts.shares import Bucket
from recipe.async_pipeline.weight_sync.hosts.transport import Header, header_of
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from recipe.async_pipeline.weight_sync.memory.segment import Segment
from recipe.async_pipeline.weight_sync.memory.segment_names import SHM_DIR
from tests.fakes.buckets import SIZES, manifest, payload, read, whole


class Deliveries(RuleBasedStateMachine):
    """Knows which buckets of the awaited version are in, and what was complete last."""

    @initialize()
    def start(self) -> None:
        self.slots = (Slot(), Slot())
        self.filling = 0
        self.incoming: Incoming | None = None
        self.awaited: Manifest | None = None
        self.sizes: tuple[int, ...] = SIZES
        self.arrived: set[int] = set()
        self.complete: Manifest | None = None
        self.expected: list[bytes] = []
        self.counts: Counter[BucketVerdict] = Counter()
        self.last = -1

    def teardown(self) -> None:
        if hasattr(self, "slots"):
            for slot in self.slots:
                slot.close()

    @precondition(lambda self: self.awaited is None)
    @rule(jump=st.integers(1, 3), grown=st.integers(0, 40))
    def begin(self, jump: int, grown: int) -> None:
        self.sizes = tuple(n + grown for n in SIZES)
        self.awaited = manifest(self.last + jump, self.sizes)
        self.incoming = Incoming([self.awaited], self.slots[self.filling])
        self.arrived, self.counts = set(), Counter()

    def deliver(self, header: bytes, data: bytes, verdict: BucketVerdict) -> None:
        assert self.incoming is not None
        assert self.incoming.accept(header, data) is verdict
        self.counts[verdict] += 1

    @precondition(lambda self: self.awaited is not None)
    @rule(sequence=st.integers(0, len(SIZES) - 1))
    def arrive(self, sequence: int) -> None:
        assert self.awaited is not None
        version = self.awaited.version
        data = payload(version, sequence, self.sizes[sequence])
        verdict = BucketVerdict.REPEATED if sequence in self.arrived else BucketVerdict.ACCEPTED
        self.deliver(header_of(self.awaited, sequence), data, verdict)
        self.arrived.add(sequence)

    @precondition(lambda self: self.awaited is not None)
    @rule(sequence=st.integers(0, len(SIZES) - 1), at=st.integers(0, 7), flip=st.integers(1, 255))
    def arrive_corrupt(self, sequence: int, at: int, flip: int) -> None:
        assert self.awaited is not None
        data = bytearray(payload(self.awaited.version, sequence, self.sizes[sequence]))
        data[at] ^= flip
        verdict = BucketVerdict.REPEATED if sequence in self.arrived else BucketVerdict.CORRUPT
        self.deliver(header_of(self.awaited, sequence), bytes(data), verdict)

    @precondition(lambda self: self.awaited is not None)
    @rule(sequence=st.integers(0, len(SIZES) - 1), kept=st.integers(0, 7))
    def arrive_short(self, sequence: int, kept: int) -> None:
        assert self.awaited is not None
        data = payload(self.awaited.version, sequence, self.sizes[sequence])[:kept]
        verdict = BucketVerdict.REPEATED if sequence in self.arrived else BucketVerdict.TRUNCATED
        self.deliver(header_of(self.awaited, sequence), data, verdict)

    @precondition(lambda self: self.awaited is not None)
    @rule(sequence=st.integers(0, len(SIZES) - 1), away=st.sampled_from([-2, -1, 1, 2]))
    def arrive_of_another_version(self, sequence: int, away: int) -> None:
        assert self.awaited is not None
        version = self.awaited.version + away
        self.deliver(
            header_of(manifest(version), sequence),
            payload(version, sequence, SIZES[sequence]),
            BucketVerdict.STALE,
        )

    @precondition(lambda self: self.awaited is not None)
    @rule(header=st.sampled_from([(3, 3), (-1, 3), (0, 4), (0, 2)]))
    def arrive_with_a_wrong_number(self, header: tuple[int, int]) -> None:
        assert self.awaited is not None
        sequence, count = header
        encoded = msgspec.msgpack.encode(Header(self.awaited.version, sequence, count, 8))
        self.deliver(encoded, bytes(8), BucketVerdict.UNKNOWN)

    @precondition(lambda self: self.awaited is not None)
    @rule(noise=st.binary(max_size=12))
    def arrive_with_nonsense_for_a_header(self, noise: bytes) -> None:
        self.deliver(b"\xc1" + noise, b"", BucketVerdict.CORRUPT)

    @precondition(lambda self: self.awaited is not None and len(self.arrived) == len(SIZES))
    @rule()
    def commit(self) -> None:
        assert self.awaited is not None
        assert self.incoming is not None
        self.last, self.filling = self.awaited.version, 1 - self.filling
        self.complete, self.expected = self.incoming.finish(), whole(self.last, self.sizes)
        self.awaited = self.incoming = None

    @precondition(lambda self: self.awaited is not None and len(self.arrived) < len(SIZES))
    @rule()
    def commit_too_early(self) -> None:
        assert self.incoming is not None
        with pytest.raises(WeightSyncError, match="are missing"):
            self.incoming.finish()

    @rule()
    def abort(self) -> None:
        self.awaited = self.incoming = None

    @precondition(lambda self: self.awaited is None)
    @rule()
    def crash(self) -> None:
        """Another process takes over, with no memory of this one."""
        for slot in self.slots:
            slot.close()
        self.start()

    @invariant()
    def what_is_complete_is_whole(self) -> None:
        if getattr(self, "complete", None) is not None:
            assert self.complete is not None and read(self.complete) == self.expected

    @invariant()
    def what_is_missing_is_known(self) -> None:
        if getattr(self, "incoming", None) is not None:
            assert self.incoming is not None
            missing = {bucket.sequence for bucket in self.incoming.missing()}
            assert missing == set(range(len(SIZES))) - self.arrived

    @invariant()
    def everything_is_counted(self) -> None:
        if getattr(self, "incoming", None) is not None:
            assert self.incoming is not None
            assert self.incoming.verdicts == self.counts


TestDeliveries = Deliveries.TestCase
TestDeliveries.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, database=None, derandomize=True
)


@settings(deadline=None, database=None, derandomize=True, max_examples=200)
@given(data=st.data())
def test_any_header_has_a_verdict(data: st.DataObject) -> None:
    slot = Slot()
    incoming = Incoming([manifest(1)], slot)
    try:
        whole = bytearray(header_of(manifest(1), 0))
        for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=3)):
            whole[at] = data.draw(st.integers(0, 255))
        header = data.draw(
            st.one_of(st.just(bytes(whole)), st.binary(max_size=30), st.just(pickle.dumps(print)))
        )
        size = data.draw(st.sampled_from([0, SIZES[0], 10 * SIZES[0]]))
        assert incoming.accept(header, payload(1, 0, size)) in BucketVerdict
    finally:
        slot.close()


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot()
    yield made
    made.close()


def fetching(version: int, spoil: Callable[[int, int, bytes], bytes]) -> Fetch:
    """Fetches buckets of a version; `spoil(sequence, attempt, data)` says what really comes."""

    async def fetch(bucket: Bucket, attempt: int) -> tuple[bytes, bytes]:
        data = payload(version, bucket.sequence, SIZES[bucket.sequence])
        return header_of(manifest(version), bucket.sequence), spoil(bucket.sequence, attempt, data)

    return fetch


def received(
    slot: Slot, version: int, spoil: Callable[[int, int, bytes], bytes] = lambda s, a, d: d
) -> Manifest:
    return asyncio.run(receive(Incoming([manifest(version)], slot), fetching(version, spoil)))


async def test_a_bucket_that_comes_broken_is_fetched_again(slot: Slot) -> None:
    incoming = Incoming([manifest(4)], slot)
    fetch = fetching(4, lambda s, attempt, data: data[:-1] if s == 1 and attempt < 2 else data)
    assert read(await receive(incoming, fetch)) == whole(4)
    assert incoming.verdicts == {BucketVerdict.ACCEPTED: 3, BucketVerdict.TRUNCATED: 2}


def test_a_bucket_that_always_comes_broken_ends_the_load(slot: Slot) -> None:
    with pytest.raises(
        WeightSyncError, match=rf"bucket \d of v5 was requested {ATTEMPTS} times; the last copy was corrupt"
    ):
        received(slot, 5, lambda s, a, data: bytes(len(data)))
    assert read(received(slot, 6)) == whole(6)


def test_what_the_way_raises_comes_through_and_the_next_version_is_welcome(slot: Slot) -> None:
    async def lost(bucket: Bucket, attempt: int) -> tuple[bytes, bytes]:
        raise ConnectionError("the other host is gone")

    with pytest.raises(ConnectionError):
        asyncio.run(receive(Incoming([manifest(1)], slot), lost))
    assert read(received(slot, 2)) == whole(2)


def test_memory_is_reused_private_and_unlinked(slot: Slot) -> None:
    names = [[bucket.segment for bucket in received(slot, version).buckets] for version in range(3)]
    assert names[0] == names[1] == names[2]
    paths = [Path(SHM_DIR / name) for name in names[0]]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    slot.close()
    assert not any(path.exists() for path in paths)


def test_several_buckets_are_on_their_way_at_once(slot: Slot) -> None:
    sizes = (8,) * 3 * IN_FLIGHT
    described = manifest(1, sizes)

    async def main() -> list[int]:
        open_now, seen, full = 0, [], asyncio.Event()

        async def fetch(bucket: Bucket, attempt: int) -> tuple[bytes, bytes]:
            nonlocal open_now
            open_now += 1
            seen.append(open_now)
            if open_now == IN_FLIGHT:
                full.set()
            await full.wait()
            open_now -= 1
            return header_of(described, bucket.sequence), payload(1, bucket.sequence, 8)

        assert read(await receive(Incoming([described], slot), fetch)) == whole(1, sizes)
        return seen

    assert max(asyncio.run(main())) == IN_FLIGHT


async def test_a_bucket_that_is_here_can_be_sent_on_before_the_version_is_complete(slot: Slot) -> None:
    incoming = Incoming([manifest(3)], slot)
    first, last = Bucket(0, 0), Bucket(0, 2)
    waiting = asyncio.ensure_future(incoming.arrived(last))
    incoming.accept(header_of(manifest(3), 0), payload(3, 0, SIZES[0]))
    await incoming.arrived(first)
    assert incoming.header(first) == header_of(manifest(3), 0)
    assert bytes(incoming.payload(first)) == payload(3, 0, SIZES[0])
    incoming.notify(ConnectionError("the other host is gone"))
    with pytest.raises(WeightSyncError, match="v3 did not arrive: the other host is gone"):
        await waiting
    with pytest.raises(WeightSyncError, match="v3 has no bucket 7 of share 0"):
        await incoming.arrived(Bucket(0, 7))


def test_a_second_copy_does_not_overwrite_one_that_is_being_checked(slot: Slot) -> None:
    """Otherwise corrupt bytes could replace correct ones after their checksum was compared."""
    incoming = Incoming([manifest(1)], slot)
    header, verdicts = header_of(manifest(1), 0), []
    memory = slot.memory

    def in_between(index: int, nbytes: int) -> Segment:
        slot.memory = memory  # type: ignore[method-assign]
        verdicts.append(incoming.accept(header, bytes(SIZES[0])))
        return memory(index, nbytes)

    slot.memory = in_between  # type: ignore[method-assign]
    verdicts.append(incoming.accept(header, payload(1, 0, SIZES[0])))
    assert verdicts == [BucketVerdict.REPEATED, BucketVerdict.ACCEPTED]
