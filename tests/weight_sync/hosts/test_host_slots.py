# SPDX-License-Identifier: Apache-2.0
"""Two slots: a version that is read, or that is the newest, is never overwritten."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.hosts.host_slots import NUM_SLOTS, HostSlots, Reader

READERS = [Reader(f"replica {i}", 10 + i, 1.0) for i in range(3)]
FOREVER = 1e9


def filled(slots: HostSlots, *versions: int) -> HostSlots:
    for version in versions:
        slots.begin_fill(version, 0.0)
        slots.commit()
    return slots


def new() -> HostSlots:
    return HostSlots(lambda reader: True)


@pytest.mark.parametrize(("first", "second"), list(product(range(3), repeat=2)))
def test_the_next_version_takes_the_slot_of_the_older_one(first: int, second: int) -> None:
    if first == second:
        with pytest.raises(WeightSyncError, match=f"v{first} is here already"):
            filled(new(), first, second)
        return
    slots = filled(new(), first, second)
    assert slots.versions == sorted((first, second))
    kept = slots.holding(max(first, second))
    assert slots.begin_fill(9, 0.0) != kept
    assert slots.versions == [max(first, second)], "what is overwritten is gone at once"


def test_an_older_version_can_be_filled_next_to_the_newest() -> None:
    slots = filled(new(), 5, 7)
    filled(slots, 6)
    assert slots.versions == [6, 7]


def test_only_one_fill_is_open() -> None:
    slots = new()
    with pytest.raises(WeightSyncError, match="commit without begin_fill"):
        slots.commit()
    slots.begin_fill(1, 0.0)
    with pytest.raises(WeightSyncError, match="v2 offered while v1 is still filling"):
        slots.begin_fill(2, 0.0)
    slots.abort()
    assert filled(slots, 2).versions == [2]


def test_a_version_that_is_read_keeps_its_slot_until_it_is_released() -> None:
    slots, reader = filled(new(), 1, 2), READERS[0]
    slots.lease(reader, 1, FOREVER)
    assert slots.in_the_way(0.0) == {1: ["replica 0"]}
    with pytest.raises(WeightSyncError, match=r"v3 has no place: \{1: \['replica 0'\]\} are being read"):
        slots.begin_fill(3, 0.0)
    slots.release(reader, 2)
    assert slots.in_the_way(0.0), "it does not read version 2"
    slots.release(reader, 1)
    assert slots.in_the_way(0.0) == {}
    assert filled(slots, 3).versions == [2, 3]


def test_a_lease_ends_at_its_deadline_with_its_process_or_with_the_readers_next_lease() -> None:
    dead: set[Reader] = set()
    slots = filled(HostSlots(lambda reader: reader not in dead), 1, 2)
    slots.lease(READERS[0], 1, until=5.0)
    assert slots.in_the_way(4.9) and not slots.in_the_way(5.0)
    slots.lease(READERS[1], 1, FOREVER)
    dead.add(READERS[1])
    assert not slots.in_the_way(0.0)
    slots.lease(READERS[2], 1, FOREVER)
    slots.lease(READERS[2]._replace(started=1.001), 2, FOREVER)
    assert not slots.in_the_way(0.0)
    slots.lease(READERS[2]._replace(pid=77), 1, FOREVER)
    assert slots.readers(2, 0.0) == ["replica 2"], "another process with this name"


class Slots(RuleBasedStateMachine):
    """Knows what may never happen: a version that is read, or the newest, disappears."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.dead: set[Reader] = set()
        self.slots = HostSlots(lambda reader: reader not in self.dead)
        self.filling: int | None = None
        self.read: dict[Reader, tuple[int, float]] = {}

    @rule(reader=st.sampled_from(READERS), version=st.integers(0, 5), lasts=st.integers(1, 9))
    def lease(self, reader: Reader, version: int, lasts: int) -> None:
        self.slots.lease(reader, version, self.now + lasts)
        self.read[reader] = (version, self.now + lasts)

    @rule(reader=st.sampled_from(READERS), version=st.integers(0, 5))
    def release(self, reader: Reader, version: int) -> None:
        self.slots.release(reader, version)
        if self.read.get(reader, (None,))[0] == version:
            del self.read[reader]

    @rule(passes=st.integers(1, 4))
    def wait(self, passes: int) -> None:
        self.now += passes

    @rule(reader=st.sampled_from(READERS))
    def die(self, reader: Reader) -> None:
        self.slots.readers(0, self.now)
        self.dead.add(reader)

    @precondition(lambda self: self.filling is None)
    @rule(version=st.integers(0, 5))
    def begin(self, version: int) -> None:
        before = self.slots.versions
        if version in before:
            return
        if self.slots.in_the_way(self.now):
            with pytest.raises(WeightSyncError, match="has no place"):
                self.slots.begin_fill(version, self.now)
            return
        assert 0 <= self.slots.begin_fill(version, self.now) < NUM_SLOTS
        self.filling = version
        lost = set(before) - set(self.slots.versions)
        assert len(lost) <= 1 and lost != {max(before, default=None)}
        assert not lost & {
            v for reader, (v, until) in self.read.items() if until > self.now and reader not in self.dead
        }

    @precondition(lambda self: self.filling is not None)
    @rule(whole=st.booleans())
    def end(self, whole: bool) -> None:
        if whole:
            self.slots.commit()
            assert self.filling in self.slots.versions
        else:
            self.slots.abort()
        self.filling = None

    @invariant()
    def there_are_two(self) -> None:
        if hasattr(self, "slots"):
            assert len(self.slots.versions) <= NUM_SLOTS - (self.filling is not None)


TestSlots = Slots.TestCase
TestSlots.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, database=None, derandomize=True
)
