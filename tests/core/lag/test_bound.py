# SPDX-License-Identifier: Apache-2.0
"""The law of the step time: its terms, a schedule that does not beat it, and all who use it on one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.events import LogRecord
from recipe.async_pipeline.core.lag.bound import LoopCosts, bound_terms, loop_terms
from recipe.async_pipeline.lab.bench.inputs.workload import Workload
from recipe.async_pipeline.lab.bench.measuring.measure import measure
from recipe.async_pipeline.lab.bench.measuring.spans import MeasuredSpan
from recipe.async_pipeline.lab.bench.measuring.usage import Usage
from recipe.async_pipeline.lab.bench.results.report import bounds
from recipe.async_pipeline.observe.account.accountant import account
from recipe.async_pipeline.tools.plan.bound import bound_terms as planned_terms
from recipe.async_pipeline.tools.plan.profile import Batch, Stage, Stages, Sync
from recipe.async_pipeline.tools.report.advice_model import Model
from recipe.async_pipeline.tools.run_directory import read_events
from tests.tools.plan.runs import write_run
from tests.tools.plan.workloads import profile, setting

COSTS = LoopCosts(tail_s=6.0, group_s=2.0, forward_s=0.5, update_s=0.7, weights_s=0.1)
SECONDS = st.floats(0, 100)


def bound(costs: LoopCosts, in_flight: int, *, pool_s: float = 1.0, bounded: bool = True) -> float:
    max_lag = in_flight - 1 if bounded else None
    return max(bound_terms({"train": pool_s}, costs, max_lag=max_lag, batches_ahead=in_flight - 1).values())


def test_on_policy_adds_up_all_latencies() -> None:
    assert bound(COSTS, 1) == pytest.approx(6.8)


def test_batches_in_flight_divide_the_loop() -> None:
    assert bound(COSTS, 2) == pytest.approx(3.4)
    assert bound(COSTS, 4) == pytest.approx(6.8 / 4)


def test_without_a_lag_bound_the_mean_latency_counts() -> None:
    assert bound(COSTS, 2, bounded=False) == pytest.approx(2.8 / 2)


def test_fewer_batches_than_the_lag_allows_are_limited_by_littles_law() -> None:
    terms = loop_terms(COSTS, max_lag=5, batches_ahead=0)
    assert terms == {"loop": pytest.approx(6.8 / 6), "littles": pytest.approx(2.8)}


def test_a_pool_can_be_the_bound() -> None:
    assert bound(COSTS, 100) == 1.0


def test_forward_passes_belong_to_an_estimate_and_not_to_a_bound() -> None:
    assert loop_terms(COSTS, max_lag=0, batches_ahead=0, forward=True)["loop"] == pytest.approx(7.3)


def test_costs_of_several_steps_add_up() -> None:
    assert COSTS + COSTS == COSTS * 2.0
    assert sum([COSTS] * 3, LoopCosts()).tail_s == pytest.approx(18.0)


@given(st.tuples(*[SECONDS] * 5), SECONDS, st.integers(1, 9), st.booleans())
def test_the_bound_is_monotonic_in_lag_and_costs(
    costs: tuple[float, ...], pool_s: float, in_flight: int, bounded: bool
) -> None:
    loop = LoopCosts(*costs)
    here = bound(loop, in_flight, pool_s=pool_s, bounded=bounded)
    assert bound(loop, in_flight + 1, pool_s=pool_s, bounded=bounded) <= here
    assert bound(loop, in_flight, pool_s=pool_s + 1.0, bounded=bounded) >= here
    for field in ("tail_s", "group_s", "update_s", "weights_s"):
        more = replace(loop, **{field: getattr(loop, field) + 1.0})
        assert bound(more, in_flight, pool_s=pool_s, bounded=bounded) >= here


@given(
    st.lists(st.lists(st.floats(0, 20), min_size=2, max_size=2), min_size=40, max_size=60),
    st.integers(1, 5),
    st.floats(0.1, 3),
    st.floats(0, 1),
)
def test_a_strict_schedule_is_never_faster_than_the_bound(
    answers: list[list[float]], in_flight: int, update_s: float, weights_s: float
) -> None:
    """Simulate a trainer that takes whole batches in order and scores in no time."""
    begun = [0.0] * in_flight
    trained = 0.0
    for batch in answers:
        trained = max(trained, begun.pop(0) + max(batch)) + update_s
        begun.append(trained + weights_s)
    tail_s = sum(map(max, answers)) / len(answers)
    costs = LoopCosts(tail_s=tail_s, update_s=update_s, weights_s=weights_s)
    # The first batches only fill the pipeline.
    steps = len(answers) - in_flight + 1
    assert trained + weights_s >= bound(costs, in_flight, pool_s=update_s) * steps - max(map(max, answers))


# One run, as the planner, the report and a benchmark see it.


def spans_of(records: Sequence[LogRecord]) -> Iterator[MeasuredSpan]:
    """Yield what the probes of a benchmark would have written during the run of a log."""
    started, served = 0.0, 0.0
    gathered: dict[int, float] = {}
    for number, record in enumerate(records):
        t, facts = record.t, record.fields
        if record.event == "ANSWERED":
            yield MeasuredSpan("episode", t - float(facts["seconds"]), t, {"prompt": number})
        elif (record.role, record.event) == ("train", "LEASE"):
            started = t
        elif record.event == "TRAINED":
            yield MeasuredSpan("update_actor", started, t, {"step": facts["step"], "samples": 8, "lags": [1]})
        elif record.event == "GATHERED":
            gathered[facts["version"]] = t
        elif record.event == "SERVED":
            begun = max(gathered[facts["version"]], served) - float(facts["gather_s"])
            served = t
            yield MeasuredSpan("weights", begun, t, {})


@pytest.mark.parametrize(("strategy", "max_lag"), [("on_policy", 0), ("one_step_off", 1)])
@pytest.mark.parametrize("loads_at_once", [1, 2])
def test_plan_report_and_benchmark_agree_on_one_run(
    tmp_path: Path, strategy: str, max_lag: int, loads_at_once: int
) -> None:
    workload = Workload(reason="recorded", steps=8, warmup=4, cooldown=4)
    of = profile(
        batch=Batch(groups=workload.prompts_per_step, answers=2),
        stages=Stages(update=Stage(fixed_s=0.5), logp=Stage(fixed_s=0.2), gather=Stage(fixed_s=0.1)),
        sync=Sync(transfer_s=0.05, load_s=0.15, commit_s=0.1, loads_at_once=loads_at_once),
    )
    run, steps = setting(of, strategy, steps=16), 16
    write_run(run, tmp_path)
    records = read_events(tmp_path / "events.jsonl")

    planned = planned_terms(run)["loop"]
    assert planned == pytest.approx((1.0 + 0.5 + 0.1 + 0.1 + 0.2 / loads_at_once) / (max_lag + 1))

    found = account(records)
    assert found.loop_s / steps == pytest.approx(planned)

    measured = measure(
        list(spans_of(records)),
        [Usage(0.0, {"generate": 0.0}, 1), Usage(1e3, {"generate": 1.0}, 1)],
        workload,
        started=0.0,
        load_before=0.0,
    )
    assert bounds({strategy: [measured]}, cores=2)[strategy]["loop"] == pytest.approx(planned, rel=1e-3)

    # The advice begins with the same loop, and adds the forward passes.
    advised = Model.of(found, max_lag)
    assert advised.loop_s() / steps == pytest.approx(planned + 0.2 / (max_lag + 1))
