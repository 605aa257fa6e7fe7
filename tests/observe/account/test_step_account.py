# SPDX-License-Identifier: Apache-2.0
"""The device-seconds of all steps add up to the summary."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.events import LogRecord, overlap_seconds
from recipe.async_pipeline.core.groups.items import StepBatch
from recipe.async_pipeline.core.replay import busy_intervals
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.observe.account.accountant import account
from recipe.async_pipeline.observe.account.step_account import OverlapMeter, StepAccountant, summary_of
from tests.fakes.trainer import SimTrainer


class AccountingTrainer(SimTrainer):
    """Takes the metrics once per step, as the real trainer does."""

    def __init__(self, accounts: StepAccountant) -> None:
        super().__init__(max_lag=1, steps=8)
        self.accounts = accounts
        self.taken: list[dict[str, float]] = []
        self.critical: list[str] = []

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        self.taken.append(self.accounts.take())
        self.critical.append(self.accounts.critical_role())


def test_steps_add_up_to_the_run() -> None:
    accounts = StepAccountant()
    assert accounts.critical_role() == ""
    trainer = AccountingTrainer(accounts)
    flow = AsyncTrainingFlow(trainer)
    flow.log.subscribe(accounts)
    run_virtual(flow.run())

    rest = accounts.take()
    whole = account(flow.log.records)
    for kind, reason in (("busy", "compute_train"), ("idle", "wait_generate"), ("busy", "sync")):
        total = sum(step.get(f"{kind}/train/{reason}_s", 0.0) for step in [*trainer.taken, rest])
        assert total == pytest.approx(whole.pools["train"].seconds[reason]), reason
    assert total > 0
    assert all(
        0 <= step["bubble_ratio"] <= 1 and 0 <= step["overlap_efficiency"] <= 1 for step in trainer.taken
    )
    assert not any("start_up" in name for step in trainer.taken for name in step)

    assert set(trainer.critical) <= {"train", "logp", "ref_logp", "generate", "param_update"}
    assert accounts.summary() == summary_of(whole)
    shown = accounts.summary()["device_seconds"]["train"]
    assert shown.pop("devices") == 1
    assert sum(shown.values()) == pytest.approx(whole.wall_s, abs=0.01)


def record(t: float, role: str, state: str | None, lane: int = 0) -> LogRecord:
    return LogRecord(t=t, role=role, event="E", state=state, fields={"lane": lane} if lane else {})


def total(*records: LogRecord) -> float:
    meter = OverlapMeter()
    for one in records:
        meter(one)
    return meter.seconds


def test_only_time_in_which_both_compute_counts() -> None:
    assert total(
        record(0, "generate", "RUNNING"),
        record(2, "train", "RUNNING"),
        record(5, "generate", "WAITING_OUTPUT"),
        record(6, "generate", "RUNNING"),
        record(7, "train", "WAITING_INPUT"),
        record(9, "generate", "DONE"),
    ) == pytest.approx(3 + 1)


def test_a_stage_computes_while_any_of_its_lanes_does() -> None:
    assert total(
        record(0, "train", "RUNNING"),
        record(1, "generate", "RUNNING"),
        record(2, "generate", "RUNNING", lane=1),
        record(3, "generate", "WAITING_INPUT"),
        record(6, "generate", "WAITING_INPUT", lane=1),
    ) == pytest.approx(5)


def test_other_stages_and_facts_do_not_count() -> None:
    assert (
        total(
            record(0, "generate", "RUNNING"),
            record(0, "logp", "RUNNING"),
            record(1, "train", None),
            record(9, "train", "RUNNING"),
            record(9, "generate", "FAILED"),
        )
        == 0
    )


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(
    max_lag=st.integers(0, 3),
    update_s=st.sampled_from([0.1, 1.0, 5.0]),
    answer_s=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_agrees_with_the_log_of_a_whole_run(max_lag: int, update_s: float, answer_s: float) -> None:
    trainer = SimTrainer(
        max_lag=max_lag, costs={"update": update_s}, answer_s=lambda step, index: answer_s * (1 + index)
    )
    flow, meter = AsyncTrainingFlow(trainer), OverlapMeter()
    flow.log.subscribe(meter)
    run_virtual(flow.run())
    records = flow.log.records
    exact = overlap_seconds(busy_intervals(records, "generate"), busy_intervals(records, "train"))
    assert meter.seconds == pytest.approx(exact)
    assert (exact > 0) == (max_lag > 0)
