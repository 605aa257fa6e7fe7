# SPDX-License-Identifier: Apache-2.0
"""The replay of a log knows lanes, waits, leases and groups at every record, and when stages were busy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.events import LogRecord
from recipe.async_pipeline.core.replay import RunState, busy_intervals, start_facts
from recipe.async_pipeline.core.waits.clock import run_virtual
from tests.fakes.trainer import WITH_CRITIC, SimTrainer


def record(t: float, state: str | None, role: str = "train", event: str = "E", **fields: Any) -> LogRecord:
    return LogRecord(t=t, role=role, event=event, state=state, fields=fields)


# Lanes, waits and leases.


@pytest.mark.parametrize("max_lag", [0, 2])
def test_the_state_is_that_of_the_pipeline_at_every_record(max_lag: int) -> None:
    trainer = SimTrainer(max_lag=max_lag, steps=4, roles=WITH_CRITIC, places={"logp": "b"})
    flow, state = AsyncTrainingFlow(trainer), RunState()

    def compare(found: LogRecord) -> None:
        state(found)
        machines = {(m.role, m.lane): m for m in flow.machines}
        for lane, name in state.lanes.items():
            assert name == machines[lane].state.name
        for pool in flow.pools or ():
            held = sorted(role if not lane else f"{role}[{lane}]" for role, lane in state.leases[pool])
            assert len(held) <= state.facts["pools"][pool]["slots"]
        assert state.t == found.t

    flow.log.subscribe(compare)
    run_virtual(flow.run())
    assert set(state.lanes.values()) == {"DONE"} and not state.gates
    assert state.versions == {"TRAINED": 4, "GATHERED": 4, "SERVED": 4}
    assert not any(state.leases.values())
    assert state.facts == start_facts(flow.log.records)


def state_of(*records: LogRecord) -> RunState:
    pools = {"train": {"roles": ["logp", "train"]}, "generate": {"roles": ["generate"]}}
    graph = {"dataloader": ["generate"], "generate": ["logp"], "logp": ["train"], "train": ["param_update"]}
    state = RunState()
    state(record(0.0, "RUNNING", "flow", "START", version=3, graph=graph, pools=pools))
    for found in records:
        state(found)
    return state


@pytest.mark.parametrize(
    ("state", "lane", "awaited"),
    [
        (state_of(record(1, "WAITING_INPUT")), "train", ("logp",)),
        (state_of(record(1, "WAITING_INPUT", "dataloader")), "dataloader", ("param_update",)),
        (state_of(record(1, "WAITING_OUTPUT")), "train", ("param_update",)),
        (state_of(record(1, "RUNNING")), "train", ()),
        (state_of(record(1, "DONE")), "train", ()),
        (state_of(), "train", ()),
        (
            state_of(record(1, "RUNNING", event="LEASE"), record(2, "WAITING_RESOURCE", "logp")),
            "logp",
            ("train",),
        ),
        (
            state_of(
                record(1, "RUNNING", event="LEASE"),
                record(2, "RUNNING", event="RELEASE"),
                record(2, "WAITING_RESOURCE", "logp"),
            ),
            "logp",
            (),
        ),
        (
            state_of(record(1, "WAITING_INPUT", "logp", "GATED", on="param_update", version=2)),
            "logp",
            ("param_update",),
        ),
    ],
)
def test_a_lane_waits_for_a_stage_that_can_end_its_wait(
    state: RunState, lane: str, awaited: tuple[str, ...]
) -> None:
    assert state.awaited_by((lane, 0)) == awaited


def test_a_gate_ends_with_its_item() -> None:
    gated = record(1, "WAITING_INPUT", "logp", "GATED", on="param_update", version=2)
    assert state_of(gated).gates == {("logp", 0): ("param_update", 2)}
    assert not state_of(gated, record(2, "WAITING_RESOURCE", "logp", "ITEM")).gates
    assert not state_of(gated, record(2, "FAILED", "logp", "FAIL")).gates


def test_versions_continue_from_the_start_of_the_process() -> None:
    assert state_of().versions == {"TRAINED": 3, "GATHERED": 3, "SERVED": 3}
    later = state_of(record(1, "RUNNING", event="TRAINED", step=4, version=4))
    assert later.versions == {"TRAINED": 4, "GATHERED": 3, "SERVED": 3}


def test_a_log_without_start_has_no_facts() -> None:
    assert start_facts([record(0, "RUNNING")]) == {}


# Groups.


def move(role: str, event: str, **fields: Any) -> LogRecord:
    return record(0.0, None, role, event, **fields)


def test_a_group_is_in_one_place_at_a_time() -> None:
    state = RunState()
    for moved, places in (
        (move("dataloader", "DRAWN", keys=["a", "b", "c"]), (3, 0, 0)),
        (move("generate", "OUTPUT", key="a"), (2, 1, 0)),
        (move("generate", "RECALLED", key="b", fate="regenerate"), (2, 1, 0)),
        (move("generate", "RECALLED", key="b", fate="drop"), (1, 1, 0)),
        (move("generate", "OUTPUT", key="c"), (0, 2, 0)),
        (move("generate", "OUTPUT", key="never drawn"), (0, 2, 0)),
        (move("logp", "OUTPUT", step=1), (0, 2, 0)),
        (move("rollout", "REJECTED", key="c", fate="filtered"), (0, 1, 0)),
        (move("rollout", "ASSEMBLED", step=1, keys=["a"]), (0, 0, 1)),
        (move("train", "TRAINED", step=1, version=1), (0, 0, 0)),
    ):
        state(moved)
        assert tuple(state.group_counts.values()) == places, moved
    assert list(state.group_counts) == ["answering", "finished", "batched"]


def test_a_whole_run_ends_with_no_group_in_flight() -> None:
    trainer = SimTrainer(
        max_lag=2,
        steps=6,
        order="finished",
        answer_s=lambda s, i: 1.0 + i,
        filtered=lambda uid: uid.endswith(".1"),
    )
    flow = AsyncTrainingFlow(trainer)
    state, most = RunState(), 0

    def watch(found: LogRecord) -> None:
        nonlocal most
        state(found)
        most = max(most, state.group_counts["answering"] + state.group_counts["finished"])

    flow.log.subscribe(watch)
    run_virtual(flow.run())
    assert sum(state.group_counts.values()) == 0
    assert 0 < most <= trainer.groups * (trainer.schedule.max_lag + 1)


# Busy time.


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
