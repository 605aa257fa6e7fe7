# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline under virtual time: order, overlap, bounds, conservation, failure."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import combinations, count
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline import AsyncTrainingFlow, RoleStateMachine, register_role
from recipe.async_pipeline.core.events import overlap_seconds
from recipe.async_pipeline.core.flow import FlowResult
from recipe.async_pipeline.core.groups.items import Group, Prompt, StepBatch
from recipe.async_pipeline.core.groups.untrained_groups import Order
from recipe.async_pipeline.core.lag.degradation import Caution
from recipe.async_pipeline.core.replay import busy_intervals
from recipe.async_pipeline.core.stage import ROLES
from recipe.async_pipeline.core.state_machine import TERMINAL, StageState
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import StalenessViolation, WaitTimeout
from recipe.async_pipeline.tools.ledger.audit import audit as audit_ledger
from tests.fakes.random_runs import ANSWER_TIMES, random_runs
from tests.fakes.trainer import ALL_ROLES, LAYOUTS, WITH_CRITIC, WITH_TEACHER, SimTrainer

pytestmark = pytest.mark.virtual_time


def run_flow(trainer: SimTrainer, **kwargs: Any) -> tuple[AsyncTrainingFlow, FlowResult]:
    flow = AsyncTrainingFlow(trainer, **kwargs)
    return flow, run_virtual(flow.run())


def overlap(flow: AsyncTrainingFlow, a: str, b: str) -> float:
    records = flow.log.records
    return overlap_seconds(busy_intervals(records, a), busy_intervals(records, b))


def wall_s(flow: AsyncTrainingFlow) -> float:
    return flow.log.records[-1].t


# What each strategy promises.


def test_on_policy_trains_every_batch_with_the_weights_of_the_step_before() -> None:
    trainer = SimTrainer(max_lag=0)
    flow, result = run_flow(trainer)
    assert result.steps == 6
    assert result.lag_max == 0
    assert [b.step for b in trainer.trained] == [1, 2, 3, 4, 5, 6]
    assert [b.first_version for b in trainer.trained] == [0, 1, 2, 3, 4, 5]
    assert overlap(flow, "generate", "train") == 0


def test_one_step_off_generates_while_it_trains() -> None:
    trainer = SimTrainer(max_lag=1)
    flow, result = run_flow(trainer)
    assert result.lag_max == 1
    assert overlap(flow, "generate", "train") > 3
    assert wall_s(flow) < wall_s(run_flow(SimTrainer(max_lag=0))[0])


def test_n_step_ahead_divides_the_tail() -> None:
    """One answer of every batch takes ten times as long as training; three batches share that wait."""

    def tail(step: int, index: int) -> float:
        return 10.0 if index == 0 else 0.5

    def seconds(lag: int) -> float:
        return wall_s(run_flow(SimTrainer(max_lag=lag, steps=24, answer_s=tail, costs={"update": 1.0}))[0])

    assert seconds(3) < 0.4 * seconds(0)
    assert seconds(3) < 0.6 * seconds(1)


def test_batches_ahead_are_bounded_by_the_lag() -> None:
    trainer = SimTrainer(max_lag=2, costs={"update": 50.0})
    run_flow(trainer)
    assert trainer.in_flight_max <= 3 * trainer.groups


def test_failing_publications_step_the_run_down_and_good_ones_up_again() -> None:
    """Versions 4 to 7 fail: blocking after two, on-policy after four, and back in two clean stretches of
    three.
    """
    trainer = SimTrainer(
        max_lag=2,
        steps=24,
        costs={"publish": 2.0},
        caution=Caution(after=2, clean=3),
        failing=lambda version: 4 <= version <= 7,
    )
    flow, result = run_flow(trainer)
    assert [change.level.name for change in trainer.changes] == [
        "BLOCKING",
        "ON_POLICY",
        "BLOCKING",
        "ASYNCHRONOUS",
    ]
    assert "a row failed; the last, because replica 0: it died" in trainer.changes[0].why
    stepped = [(r.fields["version"], r.fields["level"]) for r in flow.log.records if r.event == "STEPPED"]
    assert stepped == [(5, "BLOCKING"), (7, "ON_POLICY"), (10, "BLOCKING"), (13, "ASYNCHRONOUS")]
    assert result.lag_max == 2
    # What was ahead when it stepped down is still trained; then each batch is of the weights before it, until
    # it steps up.
    lags = {batch.step: batch.step - 1 - batch.first_version for batch in trainer.trained}
    assert [lags[step] for step in range(10, 12)] == [0, 0]
    assert max(lags[step] for step in range(16, 25)) == 2
    # Blocking: step 9 begins when version 8 is served; asynchronously a step begins when the one before is
    # gathered.
    served = {r.fields["version"]: r.t for r in flow.log.records if r.event == "SERVED"}
    begun = {r.fields["step"]: r.t for r in flow.log.records if r.role == "train" and r.event == "LEASE"}
    assert begun[9] >= served[8]
    assert begun[20] < served[19]


def test_a_run_that_was_stepped_down_continues_with_a_share_of_the_oldest() -> None:
    trainer = SimTrainer(
        max_lag=2,
        steps=12,
        groups=4,
        oldest_share=0.5,
        caution=Caution(after=1, clean=3),
        failing=lambda version: version in (3, 4),
    )
    assert run_flow(trainer)[1].steps == 12


def _lags(trainer: SimTrainer) -> list[int]:
    return [batch.step - 1 - batch.first_version for batch in trainer.trained]


def test_the_lag_follows_the_effective_sample_size_within_its_bound() -> None:
    """The policy changes fast until step 40: then each version of lag costs a quarter of the sample size."""

    def share(batch: StepBatch) -> float:
        return 1.0 - (0.25 if batch.step <= 40 else 0.01) * (batch.step - 1 - batch.first_version)

    trainer = SimTrainer(max_lag=3, steps=100, ess_floor=0.7, share=share)
    flow, result = run_flow(trainer)
    lags = _lags(trainer)
    assert result.lag_max == 3 and max(lags[:6]) == 3
    assert max(lags[15:40]) <= 2 and sum(lag == 1 for lag in lags[15:40]) > 15
    assert min(lags[90:]) == 3
    depths = [record.fields["depth"] for record in flow.log.records if record.event == "NARROWED"]
    assert depths[:2] == [2, 1] and depths[-1] == 3 and len(depths) == len(trainer.narrowings)


def test_a_floor_costs_nothing_where_the_policy_changes_slowly() -> None:
    free, held = (
        SimTrainer(max_lag=3, steps=30, ess_floor=floor, share=lambda _: 0.9) for floor in (None, 0.7)
    )
    assert wall_s(run_flow(free)[0]) == wall_s(run_flow(held)[0]) and _lags(free) == _lags(held)
    assert held.narrowings == []


def test_the_narrowed_lag_is_a_part_of_a_checkpoint() -> None:
    first = SimTrainer(max_lag=3, steps=12, ess_floor=0.7, share=lambda _: 0.1, save_every=12)
    run_flow(first)
    assert first.checkpoints[-1].flow.depth == 0
    second = SimTrainer(
        max_lag=3, steps=20, ess_floor=0.7, share=lambda _: None, resume=first.checkpoints[-1]
    )
    run_flow(second)
    assert max(_lags(second)) == 0


def test_a_step_that_waits_for_a_group_that_is_overdue_continues_when_it_comes() -> None:
    """A third of a step may have the full lag, every other group is filtered, and one answer in four takes
    longer.
    """
    times = [0.0, 0.0, 0.0, 0.1]
    stages = ("draw", "logp", "ref_logp", "update", "gather", "publish", "finish", "assemble")
    trainer = SimTrainer(
        max_lag=1,
        steps=5,
        costs=dict.fromkeys(stages, 0.0),
        answer_s=lambda step, index: times[(step * 7 + index) % 4],
        order="finished",
        oldest_share=0.5,
        filtered=lambda uid: sum(uid.encode()) % 2 == 0,
        save_every=1,
    )
    trainer.costs.update(save=0.0)
    assert run_flow(trainer)[1].steps == 5


def test_a_run_that_never_steps_down_says_nothing() -> None:
    trainer = SimTrainer(max_lag=2, caution=Caution(after=0), failing=lambda version: True)
    run_flow(trainer)
    assert trainer.changes == []


def test_a_flow_that_is_not_asynchronous_is_on_policy_for_every_strategy() -> None:
    trainer = SimTrainer(max_lag=3)
    flow, result = run_flow(trainer, enable_async_rl=False)
    assert result.lag_max == 0
    assert overlap(flow, "generate", "train") == 0


# Order.


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_the_next_update_comes_after_the_gather_of_the_last(max_lag: int) -> None:
    trainer = SimTrainer(max_lag=max_lag)
    run_flow(trainer)
    calls = trainer.calls
    for step in range(2, 7):
        assert (
            calls.index(f"update:{step - 1}")
            < calls.index(f"gather:{step - 1}")
            < calls.index(f"update:{step}")
        )
        assert calls.index(f"gather:{step - 1}") < calls.index(f"logp:{step}"), (
            "old log-probs of the right version"
        )


def test_training_continues_while_a_version_is_published() -> None:
    flow, _ = run_flow(
        SimTrainer(max_lag=3, answer_s=lambda s, i: 0.1, costs={"publish": 0.9, "update": 1.0})
    )
    assert overlap(flow, "param_update", "train") > 2


def test_a_slow_publication_holds_back_the_one_after_the_next_gather() -> None:
    trainer = SimTrainer(
        max_lag=4, answer_s=lambda s, i: 0.1, costs={"publish": 20.0, "update": 1.0}, steps=5
    )
    run_flow(trainer)
    calls = trainer.calls
    assert calls.index("gather:2") > calls.index("publish:1"), "two arenas: v2 waits for v0 to be read"
    assert [c for c in calls if c.startswith("publish")] == [f"publish:{v}" for v in range(6)]


def test_validation_of_a_version_comes_before_the_next_publication() -> None:
    trainer = SimTrainer(max_lag=2, costs={"validate": 3.0})
    run_flow(trainer)
    assert [c for c in trainer.calls if c.startswith("validate")] == [f"validate:{v}" for v in range(7)]


def test_groups_of_later_steps_that_finish_first_wait_for_their_turn() -> None:
    trainer = SimTrainer(max_lag=2, steps=3, answer_s=lambda step, index: 9.0 if step == 1 else 0.1)
    run_flow(trainer)
    assert [b.step for b in trainer.trained] == [1, 2, 3]


def test_metrics_of_parallel_stages_meet_at_the_join() -> None:
    trainer = SimTrainer()
    run_flow(trainer)
    assert all(dict(b.metrics) == {"logp": b.step, "ref_logp": b.step} for b in trainer.trained)


def test_a_run_without_reference_policy_has_no_such_role() -> None:
    trainer = SimTrainer(roles=[r for r in ALL_ROLES if r != "ref_logp"])
    flow, result = run_flow(trainer)
    assert result.steps == 6
    assert "ref_logp" not in {m.role for m in flow.machines}
    assert not any(c.startswith("ref_logp") for c in trainer.calls)


# Stages on separate devices.


def test_on_separate_pools_all_compute_at_once() -> None:
    apart = SimTrainer(
        max_lag=1, steps=12, places=LAYOUTS[3], old="logp_pool", costs={"logp": 1.0, "ref_logp": 1.0}
    )
    flow, _ = run_flow(apart)
    for a, b in combinations(("logp", "ref_logp", "train", "generate"), 2):
        assert overlap(flow, a, b) > 4, (a, b)


def test_under_the_trainers_own_weights_log_probs_cannot_overlap_the_step_before() -> None:
    flow, _ = run_flow(SimTrainer(max_lag=2, steps=12, places={"logp": "logp"}, old="trainer"))
    assert overlap(flow, "logp", "train") == 0
    notes = [(r.fields["step"], r.fields["version"]) for r in flow.log.records if r.event == "OLD_POLICY"]
    assert notes == [(step, step - 1) for step in range(1, 13)]


def test_a_pool_for_log_probs_is_one_step_behind_the_trainer() -> None:
    flow, _ = run_flow(SimTrainer(max_lag=2, steps=12, places={"logp": "logp"}, old="logp_pool"))
    assert overlap(flow, "logp", "train") > 2
    notes = [(r.fields["step"], r.fields["version"]) for r in flow.log.records if r.event == "OLD_POLICY"]
    assert notes == [(step, max(0, step - 2)) for step in range(1, 13)]


def test_a_reference_that_is_refreshed_is_one_of_the_published_versions() -> None:
    trainer = SimTrainer(max_lag=1, steps=9, refresh=3)
    run_flow(trainer)
    assert [trainer.schedule.reference(step) for step in range(1, 10)] == [None, None, None, 3, 3, 3, 6, 6, 6]
    assert trainer.held["ref_logp"] == 6


# With a critic.


def test_the_critic_learns_concurrently_with_the_policy_on_separate_devices() -> None:
    flow, _ = run_flow(SimTrainer(max_lag=1, steps=12, roles=WITH_CRITIC, places={"critic": "critic"}))
    assert overlap(flow, "critic", "train") > 8


def test_on_the_same_devices_the_critic_comes_first() -> None:
    trainer = SimTrainer(max_lag=1, roles=WITH_CRITIC)
    flow, _ = run_flow(trainer)
    assert overlap(flow, "critic", "train") == 0
    assert all(
        trainer.calls.index(f"critic:{step}") < trainer.calls.index(f"update:{step}") for step in range(1, 7)
    )


def test_a_step_is_finished_with_what_the_critic_found_out() -> None:
    trainer = SimTrainer(max_lag=1, roles=WITH_CRITIC, places={"critic": "critic"}, costs={"critic": 5.0})
    run_flow(trainer)
    assert [dict(b.metrics)["critic"] for b in trainer.finished] == [1, 2, 3, 4, 5, 6]


# With a teacher.


def test_a_teacher_reads_groups_while_others_are_generated() -> None:
    settings: dict[str, Any] = {"max_lag": 2, "steps": 12, "answer_s": lambda step, index: 1.0 + index}
    apart = SimTrainer(**settings, roles=WITH_TEACHER, places={"teacher": "teacher"})
    flow, _ = run_flow(apart)
    assert overlap(flow, "teacher", "generate") > 8
    without, _ = run_flow(SimTrainer(**settings))
    # The last response of a batch is the only one whose reading a step waits for.
    assert wall_s(flow) - wall_s(without) <= apart.costs["teacher"] * 5
    assert all(group.taught for batch in apart.trained for group in batch.groups)


def test_groups_that_are_not_trained_are_not_read() -> None:
    trainer = SimTrainer(roles=WITH_TEACHER, filtered=lambda uid: uid in ("p2.0", "p3.1"))
    run_flow(trainer)
    assert {"p2.0", "p3.1"}.isdisjoint(trainer.asked) and len(trainer.asked) == 18


def test_a_group_that_the_teacher_cannot_read_is_replaced() -> None:
    class Deaf(SimTrainer):
        async def ask_teacher(self, group: Group) -> Group:
            read = await super().ask_teacher(group)
            return replace(read, flaw="no log-probs") if group.uid == "p2.1" else read

        def rejects(self, group: Group) -> Literal["filtered", "failed"] | None:
            return "failed" if group.flaw else None

    trainer = Deaf(roles=WITH_TEACHER)
    _, result = run_flow(trainer)
    assert (result.groups_failed, result.groups_trained) == (1, 18)
    assert trainer.discarded == ["p2.1"]


# Invariants under random schedules.


@pytest.mark.slow
@given(
    run=random_runs(
        "logp", "ref_logp", "update", "gather", "publish", "finish", "assemble", "validate", "critic"
    ),
    times=ANSWER_TIMES,
    refresh=st.integers(0, 3),
)
def test_any_schedule_keeps_the_invariants(run: dict[str, Any], times: list[float], refresh: int) -> None:
    answers = count()
    trainer = SimTrainer(
        **run, refresh=refresh, answer_s=lambda step, index: times[next(answers) % len(times)]
    )
    steps, groups = run["steps"], run["groups"]
    flow = AsyncTrainingFlow(trainer)
    records: list[dict[str, Any]] = []
    flow.ledger.subscribe(lambda record: records.append(record.as_dict()))
    result = run_virtual(flow.run())
    assert result.lag_max <= run["max_lag"]
    assert result.groups_trained == steps * groups
    assert result.groups_drawn == steps * groups + result.groups_filtered + result.groups_expired
    assert result.groups_expired == 0 or run["straggler"] in ("drop", "mask")
    assert audit_ledger(records).violations == []
    assert len(trainer.cancelled) <= result.groups_expired + result.regenerated
    assert result.trajectories_trained == steps * groups * trainer.n
    assert [b.step for b in trainer.trained] == list(range(1, steps + 1))
    assert result.served_version == result.trainer_version == steps
    assert all(m.state is StageState.DONE for m in flow.machines)
    assert flow.pools is not None
    assert all(flow.pools.get(name).holders == () for name in flow.pools)
    for a, b in combinations(("logp", "ref_logp", "train", "values", "critic"), 2):
        if trainer.pool_of(a) == trainer.pool_of(b):
            assert overlap(flow, a, b) == 0, "roles on one pool never compute at once"


@pytest.mark.parametrize("order", ["drawn", "finished"])
def test_a_masked_straggler_holds_up_no_step_and_is_trained_within_the_bound(order: Order) -> None:
    def run(straggler: str) -> tuple[list[float], list[dict[str, Any]]]:
        trainer = SimTrainer(
            max_lag=1,
            steps=8,
            order=order,
            straggler=straggler,
            answer_s=lambda step, index: 9.0 if (step, index) == (1, 0) else 1.0,
        )
        flow = AsyncTrainingFlow(trainer)
        records: list[dict[str, Any]] = []
        flow.ledger.subscribe(lambda record: records.append(record.as_dict()))
        run_virtual(flow.run())
        assert audit_ledger(records).violations == []
        return [one.t for one in flow.log.records if one.event == "TRAINED"], records

    waited, _ = run("wait")
    ends, records = run("mask")
    assert ends[-1] < waited[-1] - 2.0
    trained = [record for record in records if record["kind"] == "trained"]
    (late,) = [record for record in trained if "p1.0" in record["uids"]]
    assert late["step"] > 2, "without a mask it could be in the second step at the latest"
    assert late["lag_max"] <= 1
    assert late["masked_before"] == {f"p1.0_{i}_0": late["step"] - 2 for i in range(2)}
    assert sum("masked_before" in record for record in trained) == 1

    forgotten = [{k: v for k, v in record.items() if k != "masked_before"} for record in records]
    found = audit_ledger(forgotten).violations
    assert len(found) == 2 and all("from 0 to 1 is allowed" in one for one in found)


def test_completion_order_does_not_wait_for_the_slow_ones() -> None:
    """One answer in eight takes ten steps; it is in time for the step that it is due in."""

    def tail(step: int, index: int) -> float:
        return 9.0 if index == step % 8 else 0.5

    def seconds(order: Order) -> float:
        trainer = SimTrainer(max_lag=9, steps=60, groups=8, answer_s=tail, order=order)
        return wall_s(run_flow(trainer)[0])

    assert seconds("finished") <= seconds("drawn")


def test_dropping_is_faster_than_waiting_and_says_what_it_lost() -> None:
    def tail(step: int, index: int) -> float:
        return 50.0 if index == 0 else 0.5

    waited = run_flow(SimTrainer(max_lag=1, groups=4, steps=12, answer_s=tail, order="finished"))
    dropped = run_flow(
        SimTrainer(max_lag=1, groups=4, steps=12, answer_s=tail, order="finished", straggler="drop")
    )
    assert wall_s(dropped[0]) < 0.3 * wall_s(waited[0])
    assert dropped[1].groups_expired > 0
    assert {r.fields["fate"] for r in dropped[0].log.records if r.event == "RECALLED"} == {"drop"}


def test_weights_are_published_every_so_many_steps_and_at_the_end() -> None:
    trainer = SimTrainer(max_lag=2, steps=8, sync_every=3)
    _, result = run_flow(trainer)
    assert [p.version for p in result.publications] == [0, 3, 6, 8]
    assert [c for c in trainer.calls if c.startswith("gather")] == [
        "gather:0",
        "gather:3",
        "gather:6",
        "gather:8",
    ]
    assert result.lag_max == 2


def test_filtered_groups_are_replaced_within_the_same_step() -> None:
    trainer = SimTrainer(max_lag=0, steps=3, groups=4, filtered=lambda uid: uid == "p1.2")
    _, result = run_flow(trainer)
    assert [len(b.groups) for b in trainer.trained] == [4, 4, 4]
    assert "p1.2" not in {g.uid for b in trainer.trained for g in b.groups}
    assert (result.groups_drawn, result.groups_filtered, result.lag_max) == (13, 1, 0)
    assert trainer.discarded == ["p1.2"]


# Failure.


@pytest.mark.parametrize(
    "where",
    [
        "draw",
        "generate",
        "assemble",
        "logp",
        "ref_logp",
        "advantage",
        "update",
        "finish",
        "gather",
        "publish",
        "validate",
    ],
)
def test_the_first_error_of_any_role_ends_the_run_as_it_is(where: str) -> None:
    error = RuntimeError(f"{where} broke")
    trainer = SimTrainer(max_lag=2, fail={where: error})
    flow = AsyncTrainingFlow(trainer)
    with pytest.raises(RuntimeError, match=f"{where} broke") as caught:
        run_virtual(flow.run())
    assert caught.value is error
    assert vars(error)["stage"] == flow.failures[0][0]
    states = [m.state for m in flow.machines]
    assert all(s in TERMINAL for s in states)
    assert StageState.FAILED in states
    assert StageState.DONE not in states
    assert flow.log.records[-1].event == "FAILED"


@pytest.mark.parametrize("order", ["drawn", "finished"])
def test_generation_that_is_ten_times_faster_than_training_is_held_back(order: Order) -> None:
    """What is drawn and has no fate is bounded, however long a run continues: prompts, answers, batches."""
    trainer = SimTrainer(
        max_lag=3, steps=60, groups=4, answer_s=lambda step, index: 0.1, costs={"update": 4.0}, order=order
    )
    flow = AsyncTrainingFlow(trainer)
    live: list[int] = []
    flow.log.subscribe(lambda record: live.append(len(flow.fates.in_flight)))
    run_virtual(flow.run())
    assert max(live) == (3 + 1) * 4
    assert trainer.in_flight_max <= (3 + 1) * 4


def test_no_replica_left_to_serve_ends_the_run_as_it_is() -> None:
    trainer = SimTrainer(max_lag=2, falls_at=5.5)
    flow = AsyncTrainingFlow(trainer)
    with pytest.raises(ConnectionError, match="no replica serves any more"):
        run_virtual(flow.run())
    assert {m.state for m in flow.machines} == {StageState.STOPPED}
    assert flow.log.records[-1].fields["why"] == "watch: ConnectionError: no replica serves any more"


async def test_a_run_that_is_cancelled_stops_every_role() -> None:
    flow = AsyncTrainingFlow(SimTrainer(steps=1000))

    task = asyncio.create_task(flow.run())
    await asyncio.sleep(20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {m.state for m in flow.machines} == {StageState.STOPPED}


@pytest.mark.parametrize("straggler", ["regenerate", "drop"])
async def test_an_error_ends_the_run_at_once_while_a_recalled_group_lingers(straggler: str) -> None:
    """The stop comes while a group that was recalled still ends, which must not look like the recall."""

    class Lingering(SimTrainer):
        async def answer(self, prompt: Prompt) -> Group:
            try:
                return await super().answer(prompt)
            except asyncio.CancelledError:
                await asyncio.sleep(10)
                raise

        async def update(self, batch: StepBatch) -> StepBatch:
            await asyncio.sleep(4.25)
            raise RuntimeError("the optimizer broke")

    trainer = Lingering(
        max_lag=1,
        groups=1,
        straggler=straggler,
        answer_s=lambda step, index: 3600.0 if step == 1 else 1.0,
        order="drawn",
    )
    trainer.wait_timeout_s = 1e6
    flow, ended = AsyncTrainingFlow(trainer), []

    with pytest.raises(RuntimeError, match="the optimizer broke"):
        await flow.run()
    ended.append(asyncio.get_running_loop().time())
    failed = next(record.t for record in flow.log.records if record.event == "FAIL")
    assert trainer.cancelled == ["p1.0"], "it was recalled"
    assert ended == [pytest.approx(failed)]


def test_a_wait_that_expires_names_the_waiter_and_the_holder() -> None:
    trainer = SimTrainer(answer_s=lambda step, index: 1e6 if step == 2 else 1.0)
    with pytest.raises(WaitTimeout) as caught:
        run_virtual(AsyncTrainingFlow(trainer).run())
    assert "waited 1000 s" in str(caught.value)
    assert "running: generate" in str(caught.value), "the culprit, whichever stage noticed first"


def test_a_trajectory_older_than_the_bound_never_reaches_the_optimizer() -> None:
    class Stale(SimTrainer):
        async def answer(self, prompt: Any) -> Any:
            self.served, now = max(0, self.served - 2), self.served
            try:
                return await super().answer(prompt)
            finally:
                self.served = max(now, self.served)

    trainer = Stale(max_lag=1)
    with pytest.raises(StalenessViolation, match="got groups of lag 2"):
        run_virtual(AsyncTrainingFlow(trainer).run())
    assert all(b.step - 1 - b.first_version <= 1 for b in trainer.trained)


# Custom stages.


@pytest.fixture
def audit() -> Any:
    seen: list[int] = []

    class Audit(RoleStateMachine):
        async def process(self, item: Any) -> None:
            seen.append(item.step)
            await self.emit(item)

    register_role("audit")(Audit)
    yield seen
    del ROLES["audit"]


def test_a_role_of_ones_own_runs_between_two_others(audit: list[int]) -> None:
    trainer = SimTrainer(max_lag=1)
    flow = AsyncTrainingFlow(trainer)
    flow.insert("audit", after="reward", before="train")
    assert run_virtual(flow.run()).steps == 6
    assert audit == [1, 2, 3, 4, 5, 6]
    assert "audit" in {r.role for r in flow.log.records}


def test_a_stage_may_stand_between_the_critic_and_the_step(audit: list[int]) -> None:
    trainer = SimTrainer(max_lag=1, roles=WITH_CRITIC, places={"critic": "critic"})
    flow = AsyncTrainingFlow(trainer)
    flow.insert("audit", after="critic", before="train")
    run_virtual(flow.run())
    assert audit == [1, 2, 3, 4, 5, 6]
    assert [dict(b.metrics)["critic"] for b in trainer.finished] == audit
