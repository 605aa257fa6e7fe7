# SPDX-License-Identifier: Apache-2.0
"""Each rule of the advice: when it applies, when it does not, and its predicted gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from recipe.async_pipeline.tools.report import advice
from recipe.async_pipeline.tools.report.advice import advise
from recipe.async_pipeline.tools.report.advice_model import Advice, Facts
from recipe.async_pipeline.tools.report.drawing.series import Series
from tests.tools.report.accounts import Pools, facts_for, run_of, work

RULE_NAMES = {"separate_pool": "pool_of_its_own"}
"""Rules whose name in --json differs from the name of their function."""


def advice_of(rule: Callable[[Facts], Advice | None], *args: Any, **kwargs: Any) -> Advice:
    found = rule(facts_for(*args, **kwargs))
    assert found is not None
    assert found.rule == RULE_NAMES.get(rule.__name__, rule.__name__)
    return found


def test_moving_a_device_predicts_the_gain_from_the_work_of_both_pools() -> None:
    """400 device-seconds of generation on 5 devices and 240 of training on 3 take 80 s instead of 100 s."""
    found = advice_of(advice.move_devices, work(0.6, 1.0), trainer={"train": 0.62, "generate": 0.38})
    assert found.gain == pytest.approx(100 / 80 - 1)
    assert (
        str(found)
        == "the trainer waited 38% of the time for generate: move 1 device from pool train to pool "
        "generate, predicted +25% samples/s"
    )


def test_the_smallest_of_equally_good_moves_is_advised() -> None:
    found = advice_of(advice.move_devices, work(0.1, 1.0, devices=(8, 4)), loop_s=66.0)
    assert found.change == "move 2 devices from pool train to pool generate", (
        "with three devices the loop is the limit"
    )
    assert found.gain == pytest.approx(100 / (400 / 6) - 1)


def test_the_finding_names_both_shares_if_the_trainer_does_not_wait_for_the_pool() -> None:
    found = advice_of(advice.move_devices, work(1.0, 0.3), trainer={"train": 1.0})
    assert found.finding == "pool train worked 100% of the time and pool generate 30%"
    assert found.change == "move 2 devices from pool generate to pool train"
    assert found.gain == pytest.approx(100 / (400 / 6) - 1)


def test_no_device_moves_between_balanced_pools_or_from_a_pool_of_one() -> None:
    assert advice.move_devices(facts_for(work(0.9, 0.92))) is None
    assert advice.move_devices(facts_for(work(0.3, 1.0, devices=(1, 1)))) is None
    assert advice.move_devices(facts_for(work(0.6, 1.0), loop_s=99.0)) is None, "the loop stays the limit"


def test_a_device_is_added_if_no_pool_can_spare_one() -> None:
    found = advice_of(advice.add_device, work(0.5, 1.0, devices=(1, 1)))
    assert found.gain == pytest.approx(1.0)
    assert found.change == "increase pool generate from 1 device to 2"
    assert advice.add_device(facts_for(work(0.6, 1.0))) is None, "one can be moved"
    assert advice.add_device(facts_for(work(0.5, 1.0, devices=(1, 1)), loop_s=98.0)) is None


def test_max_lag_rises_if_steps_wait_for_earlier_batches() -> None:
    found = advice_of(advice.raise_max_lag, work(0.4, 0.6), loop_s=100.0, max_lag=0)
    assert found.gain == pytest.approx(100 / 60 - 1), (
        "one batch more halves the loop to 50 s, and the pool of 60 s is the limit"
    )
    assert "max_lag to 1 instead of 0; async_strategy=one_step_off" in found.change
    deeper = advice_of(advice.raise_max_lag, work(0.2, 0.3), loop_s=100.0, max_lag=1)
    assert "max_lag to 6 instead of 1" in deeper.change, "2/(6+1) of 100 s is below the pool's 30 s"
    assert advice.raise_max_lag(facts_for(work(0.4, 0.97), loop_s=100.0)) is None


def test_max_lag_falls_if_devices_stay_the_limit() -> None:
    found = advice_of(
        advice.lower_max_lag,
        work(0.5, 1.0, devices=(1, 1)),
        loop_s=20.0,
        max_lag=3,
        lag_mean=Series(x=[1, 2], y=[2.5, 3.0]),
    )
    assert found.change.startswith("set max_lag to 0 instead of 3"), (
        "80 s with one batch in flight are less than 90 % of 100 s"
    )
    assert "2.8 versions old" in found.finding
    assert found.gain is None
    assert (
        "to 2 instead of 3"
        in advice_of(advice.lower_max_lag, work(0.5, 1.0, devices=(1, 1)), loop_s=60.0, max_lag=3).change
    )

    assert advice.lower_max_lag(facts_for(work(0.5, 1.0, devices=(1, 1)), loop_s=0.0, max_lag=3)) is None, (
        "the longest responses are unknown"
    )
    assert advice.lower_max_lag(facts_for(work(0.3, 1.0, devices=(4, 4)), loop_s=20.0, max_lag=3)) is None, (
        "moving devices comes first"
    )
    assert advice.lower_max_lag(facts_for(work(0.5, 1.0, devices=(1, 1)), loop_s=95.0, max_lag=3)) is None
    assert advice.lower_max_lag(facts_for(work(0.5, 1.0, devices=(1, 1)), loop_s=10.0, max_lag=0)) is None


def test_a_long_tail_matters_if_the_trainer_waits_for_it() -> None:
    facts: dict[str, Any] = {
        "trainer": {"train": 0.5, "generate": 0.5},
        "tail_s": [9.0] * 3,
        "answer_s": [3.0] * 3,
    }
    found = advice_of(advice.long_tail, work(0.5, 0.5), loop_s=100.0, **facts)
    assert "took 3.0 times as long" in found.finding
    assert found.at_most
    assert found.gain == pytest.approx(1.0)
    assert advice.long_tail(facts_for(work(0.5, 0.5), strategy="fully_async", **facts)) is None
    assert advice.long_tail(facts_for(work(0.5, 0.5), **(facts | {"tail_s": [4.0]}))) is None
    assert (
        advice.long_tail(facts_for(work(0.5, 0.5), **(facts | {"trainer": {"train": 0.9, "generate": 0.1}})))
        is None
    )


def pools_with(train: Mapping[str, float], generate: Mapping[str, float]) -> Pools:
    return {"train": (1, train), "generate": (1, generate)}


def test_idle_devices_with_open_responses_point_to_the_environment() -> None:
    found = advice_of(
        advice.slow_environment,
        pools_with({"compute_train": 50}, {"compute_generate": 50, "wait_environment": 30}),
    )
    assert found.finding.startswith("pool generate was idle 30% of the time")
    assert advice.slow_environment(facts_for(pools_with({}, {"wait_environment": 10}))) is None


def test_long_weight_updates_are_reported() -> None:
    found = advice_of(
        advice.heavy_weights, pools_with({"compute_train": 60, "sync": 20}, {"compute_generate": 30})
    )
    assert found.finding == "weight updates took 20% of pool train's time"
    assert found.gain == pytest.approx(80 / 70 - 1)
    other_pool = advice_of(
        advice.heavy_weights, pools_with({"compute_train": 90}, {"compute_generate": 30, "sync": 20})
    )
    assert other_pool.gain is None, "the other pool is the limit"
    assert "weight_sync.load_staging=device" in other_pool.change
    assert advice.heavy_weights(facts_for(pools_with({"sync": 4}, {"sync": 4}))) is None


def test_long_validation_is_reported() -> None:
    found = advice_of(advice.frequent_validation, pools_with({}, {"compute_generate": 60, "validation": 40}))
    assert found.gain == pytest.approx(100 / 80 - 1)
    assert advice.frequent_validation(facts_for(pools_with({}, {"validation": 9}))) is None


def test_forward_passes_that_limit_training_get_a_separate_pool() -> None:
    found = advice_of(
        advice.separate_pool,
        pools_with(
            {"compute_train": 70, "compute_ref_logp": 25, "compute_logp": 5}, {"compute_generate": 40}
        ),
    )
    assert found.finding.startswith("ref_logp took 25% of the time")
    assert found.gain == pytest.approx(100 / 75 - 1)
    assert (
        advice.separate_pool(
            facts_for(pools_with({"compute_train": 40, "compute_ref_logp": 25}, {"compute_generate": 99}))
        )
        is None
    )


def test_a_slow_reward_stage_is_reported() -> None:
    found = advice_of(advice.slow_reward, work(0.5, 0.5), trainer={"train": 0.75, "reward": 0.25})
    assert found.at_most
    assert found.gain == pytest.approx(1 / 3)
    assert advice.slow_reward(facts_for(work(0.5, 0.5), trainer={"train": 0.95, "reward": 0.05})) is None


@pytest.mark.parametrize("fate", ["filtered", "expired", "failed"])
def test_many_untrained_groups_are_reported(fate: str) -> None:
    found = advice_of(advice.not_trained, work(0.5, 0.5), fates={"trained": 75, fate: 25})
    assert found.finding == (
        f"25% of the drawn groups were not trained (25 {fate}), about 50 device-seconds of generation"
    )
    assert advice.not_trained(facts_for(work(0.5, 0.5), fates={"trained": 95, fate: 5})) is None
    assert advice.not_trained(facts_for(work(0.5, 0.5), fates={})) is None


def test_a_small_effective_sample_size_is_reported() -> None:
    assert (
        "sample size of a batch to 60%" in advice_of(advice.far_off_policy, work(0.5, 0.5), ess=0.6).finding
    )
    for known in ({"ess": 0.9}, {"ess": None}, {"ess": 0.5, "max_lag": 0}):
        assert advice.far_off_policy(facts_for(work(0.5, 0.5), **known)) is None


def test_a_long_start_up_is_reported() -> None:
    assert advice_of(advice.long_start, work(0.5, 0.5), start_up_s=100.0).finding.startswith(
        "50% of the run was start-up, 100 s"
    )
    assert advice.long_start(facts_for(work(0.5, 0.5), start_up_s=10.0)) is None


def test_the_largest_gain_comes_first_and_a_balanced_run_gets_no_advice() -> None:
    found = advise(
        run_of(work(0.6, 1.0), trainer={"train": 0.6, "generate": 0.25, "reward": 0.15}, start_up_s=90.0)
    )
    gains = [one.gain or 0.0 for one in found]
    assert gains == sorted(gains, reverse=True)
    assert [one.rule for one in found] == ["move_devices", "slow_reward", "long_start"]
    assert advise(run_of(work(0.95, 0.97), loop_s=90.0, trainer={"train": 0.9, "generate": 0.1})) == []


def test_few_steps_or_no_account_give_no_advice() -> None:
    assert advise(run_of(work(0.6, 1.0), steps=4)) == []
    assert advise(run_of(work(0.6, 1.0), accounting=None)) == []


def test_every_rule_is_in_the_table() -> None:
    rules: Sequence[str] = [rule.__name__ for rule in advice.RULES]
    assert len(set(rules)) == len(rules) == 13
