# SPDX-License-Identifier: Apache-2.0
"""Groups are counted where they are, and none is lost on the way."""

from __future__ import annotations

from typing import Any

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.events import LogRecord
from recipe.async_pipeline.observe.group_counts import GroupCounts
from tests.fakes.trainer import SimTrainer


def record(role: str, event: str, **fields: Any) -> LogRecord:
    return LogRecord(t=0.0, role=role, event=event, state=None, fields=fields)


def test_a_group_is_in_one_place_at_a_time() -> None:
    counts = GroupCounts()
    moves = [
        (record("dataloader", "DRAWN", keys=["a", "b", "c"]), {"answering": 3, "finished": 0, "batched": 0}),
        (record("generate", "OUTPUT", key="a"), {"answering": 2, "finished": 1, "batched": 0}),
        (
            record("generate", "RECALLED", key="b", fate="regenerate"),
            {"answering": 2, "finished": 1, "batched": 0},
        ),
        (record("generate", "RECALLED", key="b", fate="drop"), {"answering": 1, "finished": 1, "batched": 0}),
        (record("generate", "OUTPUT", key="c"), {"answering": 0, "finished": 2, "batched": 0}),
        (
            record("rollout", "REJECTED", key="c", fate="filtered"),
            {"answering": 0, "finished": 1, "batched": 0},
        ),
        (record("rollout", "ASSEMBLED", step=1, keys=["a"]), {"answering": 0, "finished": 0, "batched": 1}),
        (record("train", "TRAINED", step=1), {"answering": 0, "finished": 0, "batched": 0}),
    ]
    for move, expected in moves:
        assert counts(move) is (move.fields.get("fate") != "regenerate")
        assert counts.counts == expected


def test_other_events_move_no_group() -> None:
    counts = GroupCounts()
    assert counts(record("generate", "OUTPUT", key="never drawn")) is False
    assert counts(record("logp", "OUTPUT", step=1)) is False


def test_a_whole_run_ends_with_no_group_in_flight() -> None:
    trainer = SimTrainer(
        max_lag=2,
        steps=6,
        order="finished",
        answer_s=lambda s, i: 1.0 + i,
        filtered=lambda uid: uid.endswith(".1"),
    )
    flow = AsyncTrainingFlow(trainer)
    counts, most = GroupCounts(), 0

    def watch(found: LogRecord) -> None:
        nonlocal most
        counts(found)
        most = max(most, counts.counts["answering"] + counts.counts["finished"])

    flow.log.subscribe(watch)
    run_virtual(flow.run())
    assert sum(counts.counts.values()) == 0
    assert 0 < most <= trainer.groups * (trainer.schedule.max_lag + 1)
