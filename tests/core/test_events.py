# SPDX-License-Identifier: Apache-2.0
"""The event log, and the arithmetic of intervals."""

from __future__ import annotations

import asyncio
import json
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.events import EventLog, Interval, LogRecord, overlap_seconds
from recipe.async_pipeline.core.waits.clock import LoopClock


class ManualClock:
    """Shows the time that the test sets."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


def record(t: float, state: str | None, role: str = "train", **fields: object) -> LogRecord:
    return LogRecord(t=t, role=role, event="E", state=state, fields=fields)


@pytest.mark.virtual_time
async def test_time_counts_from_the_opening_of_the_log() -> None:
    log = EventLog(LoopClock())  # no loop runs yet

    await asyncio.sleep(100)
    log.append("flow", "START")
    await asyncio.sleep(2.5)
    log.append("train", "ITEM", "WAITING_RESOURCE", step=1)
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
    assert LogRecord.of(full.as_dict()) == full


def test_no_field_can_pass_for_the_time() -> None:
    with pytest.raises(ValueError, match="'t'"):
        EventLog(ManualClock()).append("train", "ITEM", t=7)


HORIZON_S = 30


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
