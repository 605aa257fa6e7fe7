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
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.arena import ArenaReader
from recipe.async_pipeline.weight_sync.manifest import BucketEntry, Manifest, TensorEntry
from recipe.async_pipeline.weight_sync.receiver import ATTEMPTS, Fetch, Header, Inbox, Verdict, header_of
from recipe.async_pipeline.weight_sync.segment_names import SHM_DIR

SIZES = (64, 200, 8)


def payload(version: int, sequence: int, size: int) -> bytes:
    return bytes((version * 31 + sequence * 7 + i) % 251 for i in range(size))


def manifest(version: int, sizes: tuple[int, ...] = SIZES) -> Manifest:
    """A version whose buckets hold one tensor of bytes each."""
    return Manifest(
        version=version,
        tensors=tuple(TensorEntry(f"t{i}", (n,), "uint8", i, 0, n) for i, n in enumerate(sizes)),
        buckets=tuple(
            BucketEntry(f"elsewhere-{i}", n, xxhash.xxh3_64_intdigest(payload(version, i, n)))
            for i, n in enumerate(sizes)
        ),
        samples=(),
    )


def read(local: Manifest) -> list[bytes]:
    reader = ArenaReader()
    reader.verify(local)
    return [bytes(t.numpy()) for piece in reader.read(local, 1 << 20) for _, t in piece]


def whole(version: int, sizes: tuple[int, ...] = SIZES) -> list[bytes]:
    return [payload(version, i, n) for i, n in enumerate(sizes)]


class Deliveries(RuleBasedStateMachine):
    """Knows which buckets of the awaited version are in, and what was complete last."""

    @initialize()
    def start(self) -> None:
        self.inbox = Inbox()
        self.awaited: Manifest | None = None
        self.sizes: tuple[int, ...] = SIZES
        self.arrived: set[int] = set()
        self.complete: Manifest | None = None
        self.expected: list[bytes] = []
        self.counts: Counter[Verdict] = Counter()
        self.last = -1

    def teardown(self) -> None:
        if hasattr(self, "inbox"):
            self.inbox.close()

    @precondition(lambda self: self.awaited is None)
    @rule(jump=st.integers(1, 3), grown=st.integers(0, 40))
    def begin(self, jump: int, grown: int) -> None:
        self.sizes = tuple(n + grown for n in SIZES)
        self.awaited = manifest(self.last + jump, self.sizes)
        self.inbox.begin(self.awaited)
        self.arrived = set()

    @precondition(lambda self: self.awaited is None and self.complete is not None)
    @rule(back=st.integers(0, 3))
    def begin_older(self, back: int) -> None:
        with pytest.raises(WeightSyncError, match="versions only move forward"):
            self.inbox.begin(manifest(self.last - back))

    def deliver(self, header: bytes, data: bytes, verdict: Verdict) -> None:
        assert self.inbox.accept(header, data) is verdict
        self.counts[verdict] += 1

    @precondition(lambda self: self.awaited is not None)
    @rule(sequence=st.integers(0, len(SIZES) - 1))
    def arrive(self, sequence: int) -> None:
        assert self.awaited is not None
        version = self.awaited.version
        data = payload(version, sequence, self.sizes[sequence])
        verdict = Verdict.REPEATED if sequence in self.arrived else Verdict.ACCEPTED
        self.deliver(header_of(self.awaited, sequence), data, verdict)
        self.arrived.add(sequence)

    @precondition(lambda self: self.awaited is not None)
    @rule(sequence=st.integers(0, len(SIZES) - 1), at=st.integers(0, 7), flip=st.integers(1, 255))
    def arrive_corrupt(self, sequence: int, at: int, flip: int) -> None:
        assert self.awaited is not None
        data = bytearray(payload(self.awaited.version, sequence, self.sizes[sequence]))
        data[at] ^= flip
        verdict = Verdict.REPEATED if sequence in self.arrived else Verdict.CORRUPT
        self.deliver(header_of(self.awaited, sequence), bytes(data), verdict)

    @precondition(lambda self: self.awaited is not None)
    @rule(sequence=st.integers(0, len(SIZES) - 1), kept=st.integers(0, 7))
    def arrive_short(self, sequence: int, kept: int) -> None:
        assert self.awaited is not None
        data = payload(self.awaited.version, sequence, self.sizes[sequence])[:kept]
        verdict = Verdict.REPEATED if sequence in self.arrived else Verdict.TRUNCATED
        self.deliver(header_of(self.awaited, sequence), data, verdict)

    @rule(sequence=st.integers(0, len(SIZES) - 1), away=st.sampled_from([-2, -1, 1, 2]))
    def arrive_of_another_version(self, sequence: int, away: int) -> None:
        version = (self.awaited.version if self.awaited else self.last) + away
        self.deliver(
            header_of(manifest(version), sequence), payload(version, sequence, SIZES[sequence]), Verdict.STALE
        )

    @precondition(lambda self: self.awaited is not None)
    @rule(header=st.sampled_from([(3, 3), (-1, 3), (0, 4), (0, 2)]))
    def arrive_with_a_wrong_number(self, header: tuple[int, int]) -> None:
        assert self.awaited is not None
        sequence, count = header
        encoded = msgspec.msgpack.encode(Header(self.awaited.version, sequence, count, 8))
        self.deliver(encoded, bytes(8), Verdict.UNKNOWN)

    @rule(noise=st.binary(max_size=12))
    def arrive_with_nonsense_for_a_header(self, noise: bytes) -> None:
        self.deliver(b"\xc1" + noise, b"", Verdict.CORRUPT)

    @precondition(lambda self: self.awaited is not None and len(self.arrived) == len(SIZES))
    @rule()
    def commit(self) -> None:
        assert self.awaited is not None
        self.last = self.awaited.version
        self.complete, self.expected = self.inbox.commit(), whole(self.last, self.sizes)
        self.awaited = None

    @precondition(lambda self: self.awaited is not None and len(self.arrived) < len(SIZES))
    @rule()
    def commit_too_early(self) -> None:
        with pytest.raises(WeightSyncError, match="are missing"):
            self.inbox.commit()

    @rule()
    def abort(self) -> None:
        self.inbox.abort()
        self.awaited = None

    @precondition(lambda self: self.awaited is None)
    @rule()
    def crash(self) -> None:
        """Another process takes over, with no memory of this one."""
        self.inbox.close()
        self.start()

    @invariant()
    def what_is_complete_is_whole(self) -> None:
        if getattr(self, "complete", None) is not None:
            assert self.complete is not None and read(self.complete) == self.expected
            assert self.inbox.version == self.last

    @invariant()
    def what_is_missing_is_known(self) -> None:
        if getattr(self, "awaited", None) is not None:
            assert set(self.inbox.missing()) == set(range(len(SIZES))) - self.arrived

    @invariant()
    def everything_is_counted(self) -> None:
        if hasattr(self, "inbox"):
            assert self.inbox.verdicts == self.counts


TestDeliveries = Deliveries.TestCase
TestDeliveries.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, database=None, derandomize=True
)


@settings(deadline=None, database=None, derandomize=True, max_examples=200)
@given(data=st.data())
def test_any_header_has_a_verdict(data: st.DataObject) -> None:
    inbox = Inbox()
    inbox.begin(manifest(1))
    try:
        whole = bytearray(header_of(manifest(1), 0))
        for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=3)):
            whole[at] = data.draw(st.integers(0, 255))
        header = data.draw(
            st.one_of(st.just(bytes(whole)), st.binary(max_size=30), st.just(pickle.dumps(print)))
        )
        size = data.draw(st.sampled_from([0, SIZES[0], 10 * SIZES[0]]))
        assert inbox.accept(header, payload(1, 0, size)) in Verdict
    finally:
        inbox.close()


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


def fetching(version: int, spoil: Callable[[int, int, bytes], bytes]) -> Fetch:
    """Fetches buckets of a version; `spoil(sequence, attempt, data)` says what really comes."""
    attempts: Counter[int] = Counter()

    async def fetch(sequence: int) -> tuple[bytes, bytes]:
        attempts[sequence] += 1
        data = payload(version, sequence, SIZES[sequence])
        return header_of(manifest(version), sequence), spoil(sequence, attempts[sequence], data)

    return fetch


def test_a_bucket_that_comes_broken_is_fetched_again(inbox: Inbox) -> None:
    fetch = fetching(4, lambda sequence, attempt, data: data[:-1] if sequence == 1 and attempt < 3 else data)
    local = asyncio.run(inbox.receive(manifest(4), fetch))
    assert read(local) == whole(4)
    assert inbox.verdicts == {Verdict.ACCEPTED: 3, Verdict.TRUNCATED: 2}


def test_a_bucket_that_always_comes_broken_ends_the_load_and_leaves_the_old_version(inbox: Inbox) -> None:
    local = asyncio.run(inbox.receive(manifest(4), fetching(4, lambda s, a, data: data)))
    broken = fetching(5, lambda s, a, data: bytes(len(data)))
    with pytest.raises(
        WeightSyncError, match=f"bucket 0 of v5 was requested {ATTEMPTS} times; the last copy was corrupt"
    ):
        asyncio.run(inbox.receive(manifest(5), broken))
    assert (inbox.version, read(local)) == (4, whole(4))
    again = asyncio.run(inbox.receive(manifest(6), fetching(6, lambda s, a, data: data)))
    assert read(again) == whole(6)


def test_what_the_way_raises_comes_through_and_the_next_version_is_welcome(inbox: Inbox) -> None:
    async def lost(sequence: int) -> tuple[bytes, bytes]:
        raise ConnectionError("the other host is gone")

    with pytest.raises(ConnectionError):
        asyncio.run(inbox.receive(manifest(1), lost))
    asyncio.run(inbox.receive(manifest(2), fetching(2, lambda s, a, data: data)))
    assert inbox.version == 2


def test_memory_is_reused_private_and_unlinked(inbox: Inbox) -> None:
    names = []
    for version in range(4):
        local = asyncio.run(inbox.receive(manifest(version), fetching(version, lambda s, a, data: data)))
        names.append([bucket.segment for bucket in local.buckets])
    assert names[0] == names[2] and names[1] == names[3]
    assert not set(names[0]) & set(names[1])
    paths = [Path(SHM_DIR / name) for name in (*names[0], *names[1])]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    inbox.close()
    assert not any(path.exists() for path in paths)
