# SPDX-License-Identifier: Apache-2.0
"""Every device-second has exactly one, correct reason, and the sums add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.events import LogRecord, overlap_seconds
from recipe.async_pipeline.core.groups.items import Group, Prompt, StepBatch
from recipe.async_pipeline.core.lag.bound import LoopCosts
from recipe.async_pipeline.core.replay import busy_intervals
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.observe.account.accountant import (
    Accountant,
    OverlapMeter,
    StepAccountant,
    account,
    summary_of,
)
from recipe.async_pipeline.observe.account.accounting import Accounting, AccountingError, PoolAccount
from tests.fakes.trainer import ALL_ROLES, WITH_CRITIC, SimTrainer

QUIET = {"gather": 0.0, "publish": 0.0, "logp": 0.0, "ref_logp": 0.0}


def run_log(trainer: SimTrainer, startup_s: float = 0.0) -> list[LogRecord]:
    flow = AsyncTrainingFlow(trainer, startup_s=lambda: startup_s)
    run_virtual(flow.run())
    return list(flow.log.records)


def rounded(account: PoolAccount) -> dict[str, float]:
    return {reason: round(seconds, 6) for reason, seconds in account.seconds.items() if seconds > 1e-9}


def test_on_policy_each_pool_waits_for_the_other() -> None:
    """Each step: 1 s of responses, 0.5 s of log-probs, 1 s of training, and a weight update."""
    found = account(run_log(SimTrainer(max_lag=0, steps=4), startup_s=10.0))
    # A replica reports a pause of 0.1 s for each weight update but the first.
    assert rounded(found.pools["train"]) == {
        "start_up": 10.25,
        "wait_generate": 4.0,
        "compute_logp": 1.0,
        "compute_ref_logp": 1.0,
        "compute_train": 4.0,
        "sync": 0.5,
        "wait_param_update": 0.5,
    }
    assert rounded(found.pools["generate"]) == {
        "start_up": 10.25,
        "compute_generate": 4.0 - 4 * 0.1,
        "sync": 4 * 0.1,
        "wait_logp": 0.75,
        "wait_ref_logp": 0.75,
        "wait_train": 3.0,
        "wait_param_update": 3 * 0.25,
        # Nothing is left to generate during the last step and its weight update.
        "none": 1.75,
    }


def test_the_critical_stage_is_the_one_that_a_step_waits_for_longest() -> None:
    slow_responses = account(run_log(SimTrainer(max_lag=0, answer_s=lambda step, index: 5.0)))
    assert {step.critical for step in slow_responses.steps} == {"generate"}
    slow_updates = account(run_log(SimTrainer(max_lag=1, costs={"update": 5.0})))
    assert [step.critical for step in slow_updates.steps] == ["train"] * 6
    assert [step.step for step in slow_updates.steps] == [1, 2, 3, 4, 5, 6]
    slow_reference = SimTrainer(max_lag=2, costs={"ref_logp": 5.0}, places={"ref_logp": "ref"})
    assert {step.critical for step in account(run_log(slow_reference)).steps[1:]} == {"ref_logp"}


def test_a_pool_of_log_probs_waits_for_the_step_that_makes_its_version() -> None:
    trainer = SimTrainer(
        max_lag=2, costs={"update": 3.0}, places={"logp": "logp"}, answer_s=lambda step, index: 0.25
    )
    shares = account(run_log(trainer)).pools["logp"].shares()
    assert next(iter(shares)) == "wait_train"


def test_measurements_of_the_servers_replace_what_the_stages_saw() -> None:
    """Of ten seconds with open groups, the engines had requests for four and paused for one."""
    accountant = Accountant()
    pools = {"rollout": {"devices": 4, "slots": 4, "roles": ["generate"]}}
    measured = {"stall_s": 2.0, "busy_s": 8.0, "replicas": 2}
    log = [
        LogRecord(
            t=0.0,
            role="flow",
            event="START",
            state="RUNNING",
            fields={"graph": {"generate": []}, "pools": pools},
        ),
        LogRecord(
            t=1.0, role="param_update", event="SERVED", state="RUNNING", fields={**measured, "version": 0}
        ),
        LogRecord(t=1.0, role="generate", event="LEASE", state="RUNNING", fields={}),
        LogRecord(
            t=11.0, role="param_update", event="SERVED", state="RUNNING", fields={**measured, "version": 1}
        ),
        LogRecord(t=13.0, role="param_update", event="VALIDATED", state="RUNNING", fields={"seconds": 1.5}),
    ]

    for record in log:
        accountant(record)
    assert accountant.settled() == {
        "rollout": {"start_up": 4.0, "sync": 4.0, "compute_generate": 12.0, "wait_environment": 24.0}
    }
    assert rounded(accountant.account().pools["rollout"]) == {
        "start_up": 4.0,
        "sync": 4.0,
        "compute_generate": 12.0 + 2.0,
        "wait_environment": 24.0,
        "validation": 6.0,
    }


def resized(records: list[LogRecord], *changes: tuple[float, int]) -> list[LogRecord]:
    """Return the records with changes of the size of the generation pool."""
    made = [
        LogRecord(
            t=t,
            role="param_update",
            event="RESIZED",
            state=None,
            fields={"pool": "generate", "devices": size},
        )
        for t, size in changes
    ]
    return sorted([*records, *made], key=lambda record: record.t)


def test_devices_count_while_they_are_in_the_pool() -> None:
    records = run_log(SimTrainer(max_lag=0, steps=4), startup_s=10.0)
    end = records[-1].t
    before, found = account(records), account(resized(records, (3.0, 3), (end - 2.0, 2)))
    pool = found.pools["generate"]
    assert pool.devices == 2
    assert pool.total == pytest.approx(10.0 + end + 2 * (end - 3.0) - 2.0)
    assert found.pools["train"] == before.pools["train"]
    passed = sum(p.total - p.seconds["start_up"] for p in found.pools.values())
    assert found.bubble_ratio == pytest.approx(1 - sum(p.busy for p in found.pools.values()) / passed)
    later = found.after(account([r for r in records if r.t < 4.0]), LoopCosts())
    assert [added for _, added in later.pools["generate"].changes][-1] == -1


def test_a_pool_waits_for_the_slow_stage_downstream() -> None:
    """A slow reward stage fills its input channel, so the pool of log-probs waits for it."""
    trainer = SimTrainer(
        max_lag=6, steps=12, costs={**QUIET, "advantage": 4.0, "update": 0.1}, places={"logp": "logp"}
    )
    found = account(run_log(trainer))
    assert found.pools["logp"].shares()["wait_reward"] > 0.5


def test_time_may_pass_between_any_two_records() -> None:
    """On a real clock, time passes between ITEM and LEASE even of a stage without devices."""
    records = run_log(SimTrainer(max_lag=1, steps=4))
    ticking = [replace(record, t=record.t + 1e-4 * number) for number, record in enumerate(records)]
    assert {step.critical for step in account(ticking).steps} == {
        step.critical for step in account(records).steps
    }


def test_shares_of_work_count_from_the_first_version() -> None:
    found = account(run_log(SimTrainer(max_lag=0, steps=4), startup_s=10.0))
    busy = 4.0 + 6.5
    assert found.bubble_ratio == pytest.approx(1 - busy / (2 * found.steady_s))
    assert found.busiest == pytest.approx(6.5 / found.steady_s)
    assert account([]).bubble_ratio == account([]).busiest == 0.0


PLACES: tuple[dict[str, str], ...] = (
    {},
    {"logp": "logp"},
    {"ref_logp": "ref"},
    {"logp": "logp", "ref_logp": "ref"},
)


@given(
    max_lag=st.integers(0, 3),
    places=st.sampled_from(PLACES),
    order=st.sampled_from(["drawn", "finished"]),
    critic=st.booleans(),
    costs=st.fixed_dictionaries(
        {k: st.floats(0, 3) for k in ("logp", "update", "publish", "gather", "advantage", "validate")}
    ),
    answers=st.lists(st.floats(0, 9), min_size=5, max_size=5),
    devices=st.integers(1, 7),
)
@pytest.mark.slow
def test_device_seconds_add_up_for_every_schedule(
    max_lag: int,
    places: dict[str, str],
    order: str,
    critic: bool,
    costs: dict[str, float],
    answers: list[float],
    devices: int,
) -> None:
    class Wide(SimTrainer):
        def pools(self) -> dict[str, int]:
            return {name: devices + number for number, name in enumerate(super().pools())}

    kinds: dict[str, Any] = {"roles": WITH_CRITIC if critic else ALL_ROLES, "order": order}
    trainer = Wide(
        max_lag=max_lag,
        steps=5,
        costs=costs,
        places=places,
        answer_s=lambda s, i: answers[(s + i) % 5],
        **kinds,
    )

    log = run_log(trainer, startup_s=2.5)
    found = account(log)  # raises AccountingError if the sums do not add up
    assert found.wall_s == pytest.approx(log[-1].t + 2.5)
    assert all(seconds >= 0 for pool in found.pools.values() for seconds in pool.seconds.values())
    assert 0 <= found.bubble_ratio <= 1
    assert 0 <= found.busiest <= 1
    assert len(found.steps) == 5


def test_efficiency_is_the_larger_bound_of_busiest_pool_and_loop() -> None:
    """Two batches in flight, 3 s responses, 1 s training and a 0.3 s update need 2.15 s a step at best."""

    class Timed(SimTrainer):
        async def answer(self, prompt: Prompt) -> Group:
            group = await super().answer(prompt)
            return replace(group, trajectories=tuple(replace(t, seconds=3.0) for t in group.trajectories))

    trainer = Timed(
        max_lag=1, steps=10, costs={**QUIET, "gather": 0.1, "publish": 0.2}, answer_s=lambda step, index: 3.0
    )
    found = account(run_log(trainer))
    assert found.loop_s == pytest.approx(10 * (3.0 + 1.0 + 0.3) / 2)
    assert found.overlap_efficiency == pytest.approx(found.loop_s / found.steady_s)
    assert 0.9 < found.overlap_efficiency <= 1.0
    assert found.overlap_efficiency > found.busiest


def test_check_rejects_sums_that_do_not_add_up() -> None:
    pool = PoolAccount(devices=2, roles=("train",))
    pool.seconds["none"] = 3.0
    with pytest.raises(AccountingError, match=r"pool train: 3\.0+ of 4\.0+ device-seconds are accounted for"):
        Accounting(wall_s=2.0, pools={"train": pool}, steps=(), steady_s=0.0).check()


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
