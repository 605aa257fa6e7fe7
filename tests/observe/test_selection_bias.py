# SPDX-License-Identifier: Apache-2.0
"""The meter tells a loss that selects from one that does not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from statistics import fmean, pstdev, stdev, variance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.observe.selection_bias import (
    MIN_SAMPLES,
    MIN_SHIFT_SD,
    MIN_T,
    Comparison,
    Fate,
    Moments,
    SelectionMeter,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)


def moments(values: Iterable[float]) -> Moments:
    made = Moments()
    for value in values:
        made.add(value)
    return made


def record(meter: SelectionMeter, fate: Fate, lengths: Iterable[int]) -> None:
    """Each was generated before it met its fate."""
    for length in lengths:
        meter.record("finished", tokens=length)
        meter.record(fate, tokens=length)


def lengths(count: int, mean: int, seed: int = 0) -> list[int]:
    drawn = random.Random(seed)
    return [max(1, round(drawn.gauss(mean, 100))) for _ in range(count)]


# Moments.


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(VALUES, VALUES)
def test_moments_are_those_of_the_whole_list(first: list[float], second: list[float]) -> None:
    for made in (moments(first + second), moments(first) + moments(second)):
        assert made.count == len(first) + len(second)
        assert made.mean == pytest.approx(fmean(first + second), abs=1e-6)
        assert made.sd == pytest.approx(stdev(first + second), rel=1e-6, abs=1e-6)


def test_a_large_mean_does_not_drown_a_small_variance() -> None:
    assert moments([1e9 + 1, 1e9 + 2, 1e9 + 3]).variance == pytest.approx(1)


def test_moments_of_too_few_values() -> None:
    assert (moments([]).mean, moments([]).variance, moments([3.0]).variance) == (0, 0, 0)
    assert Moments() + Moments() == Moments()
    assert Moments() + moments([3.0]) == moments([3.0])


# The comparison.


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=30),
    st.lists(st.integers(0, 1000), min_size=2, max_size=30),
)
def test_t_and_shift_are_those_of_their_definitions(trained: list[int], lost: list[int]) -> None:
    found = Comparison(moments(trained), moments(lost))
    error = math.sqrt(variance(trained) / len(trained) + variance(lost) / len(lost))
    if error:
        assert found.t == pytest.approx((fmean(trained) - fmean(lost)) / error, abs=1e-9)
    if pstdev(trained + lost):
        shift = (fmean(trained) - fmean(trained + lost)) / stdev(trained + lost)
        assert found.shift_sd == pytest.approx(shift, abs=1e-9)


def test_where_nothing_scatters() -> None:
    same, other = moments([5.0] * 3), moments([7.0] * 3)
    assert (Comparison(same, same).t, Comparison(same, same).shift_sd) == (0, 0)
    assert Comparison(same, other).t == -math.inf


# The metrics.


def test_nothing_recorded_is_nothing_measured() -> None:
    assert SelectionMeter().metrics() == {}
    assert SelectionMeter().warning() is None


def test_means_by_fate() -> None:
    meter = SelectionMeter()
    for tokens, turns, reward in ((10, 1, 1.0), (20, 3, 0.0), (90, 5, 0.5)):
        meter.record("finished", tokens=tokens, turns=turns, reward=reward)
    meter.record("trained", tokens=10, turns=1, reward=1.0)
    meter.record("trained", tokens=20, turns=3, reward=0.0)
    meter.record("dropped", tokens=90, turns=5, reward=0.5)
    metrics = meter.metrics()
    assert metrics["bias/tokens/finished_mean"] == pytest.approx(40)
    assert metrics["bias/tokens/trained_mean"] == pytest.approx(15)
    assert metrics["bias/tokens/dropped_mean"] == pytest.approx(90)
    assert metrics["bias/turns/trained_mean"] == pytest.approx(2)
    assert metrics["bias/reward/finished_mean"] == pytest.approx(0.5)
    assert metrics["bias/tokens/trained_vs_finished_sd"] == pytest.approx(-25 / stdev([10, 20, 90]))
    assert metrics["bias/dropped_share"] == pytest.approx(1 / 3)
    assert metrics["bias/filtered_share"] == 0
    assert not any("filtered_mean" in name or name.endswith("_t") for name in metrics)


def test_what_is_not_known_is_left_out() -> None:
    meter = SelectionMeter()
    meter.record("trained", tokens=10)
    meter.record("trained", tokens=20, reward=math.nan)
    meter.record("trained", tokens=30, reward=0.5)
    metrics = meter.metrics()
    assert metrics["bias/tokens/trained_mean"] == 20
    assert metrics["bias/reward/trained_mean"] == 0.5
    assert "bias/turns/trained_mean" not in metrics


def test_every_metric_is_finite() -> None:
    meter = SelectionMeter()
    record(meter, "trained", [5] * 3)
    record(meter, "dropped", [7] * 3)
    metrics = meter.metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["bias/tokens/dropped_shift_sd"] == pytest.approx(-1 / stdev([5, 5, 5, 7, 7, 7]))


# The warning.


def test_dropping_the_long_ones_is_said_with_its_remedy() -> None:
    meter = SelectionMeter()
    record(meter, "trained", [200, 300] * 400)
    record(meter, "dropped", [600, 700] * 100)
    assert meter.warning() == (
        "selection bias: because 200 of 1000 answers were dropped, those trained have 0.48 sd fewer tokens "
        "than all "
        "of them (on average 250, those dropped 650); if they held steps up, raise max_lag or set "
        "stale=wait; if their data or rewards were bad, see bad_data/* and failed"
    )


def test_dropping_at_random_is_not() -> None:
    meter = SelectionMeter()
    record(meter, "trained", lengths(1000, 500, seed=1))
    record(meter, "dropped", lengths(1000, 500, seed=2))
    assert meter.warning() is None


def test_a_few_that_are_far_off_do_not_matter() -> None:
    meter = SelectionMeter()
    record(meter, "trained", lengths(1000, 500))
    record(meter, "dropped", [1200] * (MIN_SAMPLES - 1))
    assert abs(meter.metrics()["bias/tokens/dropped_shift_sd"]) > MIN_SHIFT_SD
    assert meter.warning() is None
    record(meter, "dropped", [1200])
    assert meter.warning() is not None


def test_what_chance_can_do_does_not_matter() -> None:
    meter = SelectionMeter()
    record(meter, "trained", lengths(200, 500, seed=1))
    record(meter, "dropped", lengths(200, 550, seed=2))
    metrics = meter.metrics()
    assert 3 < abs(metrics["bias/tokens/dropped_t"]) < MIN_T
    assert abs(metrics["bias/tokens/dropped_shift_sd"]) > MIN_SHIFT_SD
    assert meter.warning() is None


def test_many_that_are_a_little_off_do_not_matter() -> None:
    meter = SelectionMeter()
    record(meter, "trained", lengths(3000, 500, seed=1))
    record(meter, "dropped", lengths(150, 600, seed=2))
    metrics = meter.metrics()
    assert abs(metrics["bias/tokens/dropped_t"]) > MIN_T
    assert abs(metrics["bias/tokens/dropped_shift_sd"]) < MIN_SHIFT_SD
    assert meter.warning() is None


def test_what_still_waits_for_its_step_is_no_loss() -> None:
    meter = SelectionMeter()
    record(meter, "trained", lengths(1000, 500))
    for length in lengths(1000, 900):
        meter.record("finished", tokens=length)
    assert meter.metrics()["bias/tokens/trained_vs_finished_sd"] < -MIN_SHIFT_SD
    assert meter.warning() is None


def test_it_is_said_once_and_again_after_it_was_gone() -> None:
    meter = SelectionMeter(window=1000)
    said = []
    for dropped_mean in (500, 900, 900, 500, 500, 500, 900, 900):
        for step in range(5):
            record(meter, "trained", lengths(140, 500, seed=step))
            record(meter, "dropped", lengths(60, dropped_mean, seed=step + 100))
            said.append(meter.warning() is not None)
    assert sum(said[:5]) == 0
    assert sum(said[5:15]) == 1
    assert sum(said[15:30]) == 0
    assert sum(said[30:]) == 1


def test_around_the_threshold_it_is_said_once() -> None:
    meter, said = SelectionMeter(window=10_000), 0
    record(meter, "trained", lengths(1600, 500))
    record(meter, "dropped", lengths(400, 560, seed=1))
    beyond = []
    for _ in range(30):
        beyond.append(abs(meter.metrics()["bias/tokens/dropped_shift_sd"]) >= MIN_SHIFT_SD)
        said += meter.warning() is not None
        record(meter, "trained" if beyond[-1] else "dropped", [700] * 20)
    assert sum(b and not a for a, b in zip(beyond, beyond[1:], strict=False)) > 1
    assert said == 1


def test_the_largest_is_said_first_and_the_next_one_after_it() -> None:
    meter = SelectionMeter()
    for i in range(600):
        lost: Fate = "dropped" if i % 3 == 0 else "trained"
        worse = i % 3 == 0
        meter.record(
            lost, tokens=500 + i % 50 + 300 * worse, turns=2 + i % 4 + 2 * worse, reward=(i % 2) - 0.5 * worse
        )
    lines = [meter.warning() for _ in range(4)]
    assert [
        "fewer tokens" in (lines[0] or ""),
        "fewer turns" in (lines[1] or ""),
        "more reward" in (lines[2] or ""),
    ] == [True] * 3
    assert lines[3] is None


def test_of_an_answer_that_was_given_up_seconds_may_be_all_that_is_known() -> None:
    meter = SelectionMeter()
    for i in range(900):
        meter.record("trained", tokens=300, seconds=20 + i % 10, reward=0.5)
    for _ in range(300):
        meter.record("dropped", seconds=60)
    assert meter.metrics()["bias/dropped_share"] == 0.25
    assert "bias/tokens/dropped_mean" not in meter.metrics()
    assert "fewer seconds than all" in (meter.warning() or "")
    assert meter.warning() is None


def test_a_filter_may_select_by_reward_but_not_by_length_unseen() -> None:
    meter = SelectionMeter()
    for i in range(600):
        if i % 3:
            meter.record("trained", tokens=500 + i % 7, reward=1.0 - i % 2)
        else:
            meter.record("filtered", tokens=500 + i % 7, reward=3.0)
    assert abs(meter.metrics()["bias/reward/filtered_shift_sd"]) > MIN_SHIFT_SD
    assert meter.warning() is None
    for i in range(300):
        meter.record("filtered", tokens=600 + i % 7)
    line = meter.warning()
    assert line is not None
    assert "answers were filtered" in line
    assert line.endswith("weaken the filter, if it is not meant to select by that")


def test_a_drift_of_all_lengths_is_no_bias() -> None:
    """More is dropped later, and later all are longer; within each step the dropped are like the others."""
    meter = SelectionMeter(window=500)
    for step in range(100):
        record(meter, "trained", lengths(100 - step // 2, 300 + 5 * step, seed=step))
        record(meter, "dropped", lengths(step // 2, 300 + 5 * step, seed=step + 1000))
        assert meter.warning() is None


def test_the_last_two_windows_count_and_no_older_one() -> None:
    meter = SelectionMeter(window=10)
    for value, mean in ((1000, 1000), (1, 500.5), (1, 1), (1, 1)):
        record(meter, "trained", [value] * 10)
        # The window before the last is let go with the first sample of the next one.
        assert meter.metrics()["bias/tokens/trained_mean"] == pytest.approx(mean)


def test_only_what_is_decided_fills_a_window() -> None:
    meter = SelectionMeter(window=10)
    record(meter, "trained", [7] * 10)
    for _ in range(100):
        meter.record("finished", tokens=1)
    assert meter.metrics()["bias/tokens/trained_mean"] == 7
