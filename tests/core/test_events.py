# SPDX-License-Identifier: Apache-2.0
"""The event log, and busy time computed from it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.clock import LoopClock, run_virtual
from recipe.async_pipeline.core.events import (
    EventLog,
    Interval,
    LogRecord,
    busy_intervals,
    overlap_seconds,
)


class ManualClock:
    """Shows the time that the test sets."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


def record(t: float, state: str | None, role: str = "train", **fields: object) -> LogRecord:
    return LogRecord(t=t, role=role, event="E", state=state, fields=fields)


def test_time_counts_from_the_opening_of_the_log() -> None:
    log = EventLog(LoopClock())  # no loop runs yet

    async def main() -> None:
        await asyncio.sleep(100)
        log.append("flow", "START")
        await asyncio.sleep(2.5)
        log.append("train", "ITEM", "WAITING_RESOURCE", step=1)

    run_virtual(main())
    assert [r.t for r in log.records] == [0, 2.5]


def test_time_never_goes_back() -> None:
    clock = ManualClock()
    log = EventLog(clock)
    for clock.time_s in (5.0, 8.0, 7.0, 9.0):
        log.append("train", "E")
    assert [r.t for r in log.records] == [0, 3, 3, 4]


def test_append_returns_the_record_it_keeps_and_hands_on() -> None:
    log = EventLog(ManualClock())
    early: list[LogRecord] = []
    late: list[LogRecord] = []
    log.subscribe(early.append)
    first = log.append("train", "ITEM", "WAITING_RESOURCE", step=1)
    log.subscribe(late.append)
    second = log.append("train", "LEASE", "RUNNING", step=1)
    assert list(log.records) == early == [first, second]
    assert late == [second]
    with pytest.raises(FrozenInstanceError):
        first.t = 1.0  # type: ignore[misc]


def test_a_failing_subscriber_is_heard_and_the_record_is_kept() -> None:
    def broken(_: LogRecord) -> None:
        raise OSError("disk full")

    log = EventLog(ManualClock())
    log.subscribe(broken)
    with pytest.raises(OSError, match="disk full"):
        log.append("train", "ITEM")
    assert len(log.records) == 1


def test_records_are_a_snapshot() -> None:
    log = EventLog(ManualClock())
    log.append("train", "START")
    before = log.records
    log.append("train", "ITEM")
    assert len(before) == 1


def test_keep_bounds_the_memory_but_not_what_subscribers_see() -> None:
    log = EventLog(ManualClock(), keep=2)
    seen: list[LogRecord] = []
    log.subscribe(seen.append)
    for step in range(5):
        log.append("train", "ITEM", step=step)
    assert [r.fields["step"] for r in log.records] == [3, 4]
    assert len(seen) == 5
    with pytest.raises(ValueError, match="keep=0"):
        EventLog(ManualClock(), keep=0)


def test_a_record_is_one_flat_object_in_reading_order() -> None:
    full = record(1.5, "RUNNING", step=3, version=2)
    assert json.dumps(full.as_dict()) == (
        '{"t": 1.5, "role": "train", "event": "E", "state": "RUNNING", "step": 3, "version": 2}'
    )
    assert "state" not in record(1.5, None).as_dict()


def test_no_field_can_pass_for_the_time() -> None:
    with pytest.raises(ValueError, match="'t'"):
        EventLog(ManualClock()).append("train", "ITEM", t=7)


# Busy time.


def test_no_records_no_intervals() -> None:
    assert busy_intervals([], "train") == []
    assert busy_intervals([record(1, "RUNNING", role="generate")], "train") == []


def test_an_interval_lasts_until_the_state_changes_or_the_log_ends() -> None:
    records = [
        record(1, "RUNNING"),
        record(2, None),  # an event that changes no state
        record(3, "WAITING_OUTPUT"),
        record(5, "RUNNING"),
        record(9, "WAITING_INPUT", role="generate"),
    ]
    assert busy_intervals(records, "train") == [(1, 3), (5, 9)]


def test_lanes_are_merged() -> None:
    records = [
        record(0, "RUNNING"),
        record(1, "RUNNING", lane=1),
        record(2, "WAITING_INPUT"),
        record(4, "FAILED", lane=1),
    ]
    assert busy_intervals(records, "train") == [(0, 4)]


def test_touching_intervals_are_one_and_empty_ones_are_none() -> None:
    records = [
        record(0, "RUNNING"),
        record(2, "WAITING_OUTPUT"),
        record(2, "RUNNING"),
        record(3, "WAITING_INPUT"),
        record(5, "RUNNING"),
        record(5, "WAITING_INPUT"),
    ]
    assert busy_intervals(records, "train") == [(0, 3)]


HORIZON_S = 30

STATES = st.sampled_from(["RUNNING", "WAITING_INPUT", "WAITING_OUTPUT", None])
CHANGES = st.lists(
    st.tuples(st.integers(0, HORIZON_S), st.integers(0, 2), st.sampled_from(["train", "generate"]), STATES),
    max_size=40,
).map(lambda changes: sorted(changes, key=lambda change: change[0]))


@given(CHANGES)
def test_busy_intervals_agree_with_looking_at_every_second(
    changes: list[tuple[int, int, str, str | None]],
) -> None:
    records = [record(t, state, role=role, lane=lane) for t, lane, role, state in changes]
    busy_s: set[int] = set()
    for second in range(changes[-1][0] if changes else 0):
        state_of = {
            lane: state for t, lane, role, state in changes if role == "train" and state and t <= second
        }
        if "RUNNING" in state_of.values():
            busy_s.add(second)
    found = busy_intervals(records, "train")
    assert {s for start, end in found for s in range(int(start), int(end))} == busy_s
    assert all(start < end for start, end in found)
    assert all(a[1] < b[0] for a, b in zip(found, found[1:], strict=False))


def intervals(seconds: set[int]) -> list[Interval]:
    """The intervals that cover exactly these seconds."""
    starts = sorted(s for s in seconds if s - 1 not in seconds)
    ends = sorted(s + 1 for s in seconds if s + 1 not in seconds)
    return [(float(a), float(b)) for a, b in zip(starts, ends, strict=True)]


SECONDS = st.sets(st.integers(0, HORIZON_S))


@given(SECONDS, SECONDS)
def test_overlap_counts_the_seconds_in_both(a: set[int], b: set[int]) -> None:
    assert overlap_seconds(intervals(a), intervals(b)) == len(a & b)


def test_overlap_is_exact_below_a_second() -> None:
    assert overlap_seconds([(0.0, 1.5), (2.0, 2.25)], [(1.25, 2.125)]) == 0.375
