# SPDX-License-Identifier: Apache-2.0
"""The meter distinguishes a loss that selects samples from a random loss."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from statistics import fmean, pstdev, stdev, variance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.observe.samples.selection_bias import (
    MIN_SAMPLES,
    MIN_SHIFT_SD,
    MIN_T,
    Comparison,
    Moments,
    ResponseFate,
    SelectionMeter,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)


def moments(values: Iterable[float]) -> Moments:
    made = Moments()
    for value in values:
        made.add(value)
    return made


def record(meter: SelectionMeter, fate: ResponseFate, lengths: Iterable[int]) -> None:
    """Record samples as finished and then with their fate."""
    for length in lengths:
        meter.record("finished", tokens=length)
        meter.record(fate, tokens=length)


def meter_of(trained: Iterable[int], dropped: Iterable[int]) -> SelectionMeter:
    meter = SelectionMeter()
    record(meter, "trained", trained)
    record(meter, "dropped", dropped)
    return meter


def lengths(count: int, mean: int, seed: int = 0) -> list[int]:
    drawn = random.Random(seed)
    return [max(1, round(drawn.gauss(mean, 100))) for _ in range(count)]


# Moments.


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(VALUES, VALUES)
def test_moments_match_the_whole_list(first: list[float], second: list[float]) -> None:
    for made in (moments(first + second), moments(first) + moments(second)):
        assert made.count == len(first) + len(second)
        assert made.mean == pytest.approx(fmean(first + second), abs=1e-6)
        assert made.sd == pytest.approx(stdev(first + second), rel=1e-6, abs=1e-6)


def test_a_large_mean_does_not_cancel_a_small_variance() -> None:
    assert moments([1e9 + 1, 1e9 + 2, 1e9 + 3]).variance == pytest.approx(1)


def test_moments_of_fewer_than_two_values() -> None:
    assert (moments([]).mean, moments([]).variance, moments([3.0]).variance) == (0, 0, 0)
    assert Moments() + Moments() == Moments()
    assert Moments() + moments([3.0]) == moments([3.0])


# The comparison.


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=30),
    st.lists(st.integers(0, 1000), min_size=2, max_size=30),
)
def test_t_and_shift_match_their_definitions(trained: list[int], lost: list[int]) -> None:
    found = Comparison(moments(trained), moments(lost))
    error = math.sqrt(variance(trained) / len(trained) + variance(lost) / len(lost))
    if error:
        assert found.t == pytest.approx((fmean(trained) - fmean(lost)) / error, abs=1e-9)
    if pstdev(trained + lost):
        shift = (fmean(trained) - fmean(trained + lost)) / stdev(trained + lost)
        assert found.shift_sd == pytest.approx(shift, abs=1e-9)


def test_values_without_variance() -> None:
    same, other = moments([5.0] * 3), moments([7.0] * 3)
    assert (Comparison(same, same).t, Comparison(same, same).shift_sd) == (0, 0)
    assert Comparison(same, other).t == -math.inf


# The metrics.


def test_without_samples_there_are_no_metrics_and_no_warning() -> None:
    assert SelectionMeter().metrics() == {}
    assert SelectionMeter().warning() is None


def test_metrics_have_the_mean_of_each_fate() -> None:
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


def test_unknown_quantities_are_skipped() -> None:
    meter = SelectionMeter()
    meter.record("trained", tokens=10)
    meter.record("trained", tokens=20, reward=math.nan)
    meter.record("trained", tokens=30, reward=0.5)
    metrics = meter.metrics()
    assert metrics["bias/tokens/trained_mean"] == 20
    assert metrics["bias/reward/trained_mean"] == 0.5
    assert "bias/turns/trained_mean" not in metrics


def test_every_metric_is_finite() -> None:
    meter = meter_of([5] * 3, [7] * 3)
    metrics = meter.metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["bias/tokens/dropped_shift_sd"] == pytest.approx(-1 / stdev([5, 5, 5, 7, 7, 7]))


# The warning.


def test_dropping_long_responses_warns_with_a_remedy() -> None:
    meter = meter_of([200, 300] * 400, [600, 700] * 100)
    assert meter.warning() == (
        "selection bias: 200 of 1000 responses were dropped, so the trained responses have 0.48 sd fewer "
        "tokens than all (mean 250, dropped 650); if these responses were late, raise "
        "staleness.max_lag or set staleness.straggler=wait; if their data or rewards were bad, see "
        "bad_data/* and failed"
    )


def test_dropping_at_random_does_not_warn() -> None:
    meter = meter_of(lengths(1000, 500, seed=1), lengths(1000, 500, seed=2))
    assert meter.warning() is None


def test_fewer_lost_samples_than_the_minimum_do_not_warn() -> None:
    meter = meter_of(lengths(1000, 500), [1200] * (MIN_SAMPLES - 1))
    assert abs(meter.metrics()["bias/tokens/dropped_shift_sd"]) > MIN_SHIFT_SD
    assert meter.warning() is None
    record(meter, "dropped", [1200])
    assert meter.warning() is not None


def test_a_shift_within_the_noise_does_not_warn() -> None:
    meter = meter_of(lengths(200, 500, seed=1), lengths(200, 550, seed=2))
    metrics = meter.metrics()
    assert 3 < abs(metrics["bias/tokens/dropped_t"]) < MIN_T
    assert abs(metrics["bias/tokens/dropped_shift_sd"]) > MIN_SHIFT_SD
    assert meter.warning() is None


def test_a_significant_but_small_shift_does_not_warn() -> None:
    meter = meter_of(lengths(3000, 500, seed=1), lengths(150, 600, seed=2))
    metrics = meter.metrics()
    assert abs(metrics["bias/tokens/dropped_t"]) > MIN_T
    assert abs(metrics["bias/tokens/dropped_shift_sd"]) < MIN_SHIFT_SD
    assert meter.warning() is None


def test_samples_that_wait_for_their_step_are_not_lost() -> None:
    meter = SelectionMeter()
    record(meter, "trained", lengths(1000, 500))
    for length in lengths(1000, 900):
        meter.record("finished", tokens=length)
    assert meter.metrics()["bias/tokens/trained_vs_finished_sd"] < -MIN_SHIFT_SD
    assert meter.warning() is None


def test_a_shift_warns_once_and_again_after_it_disappeared() -> None:
    meter = SelectionMeter(window=1000)
    warned = []
    for dropped_mean in (500, 900, 900, 500, 500, 500, 900, 900):
        for step in range(5):
            record(meter, "trained", lengths(140, 500, seed=step))
            record(meter, "dropped", lengths(60, dropped_mean, seed=step + 100))
            warned.append(meter.warning() is not None)
    assert sum(warned[:5]) == 0
    assert sum(warned[5:15]) == 1
    assert sum(warned[15:30]) == 0
    assert sum(warned[30:]) == 1


def test_a_shift_around_the_threshold_warns_once() -> None:
    meter, warned = SelectionMeter(window=10_000), 0
    record(meter, "trained", lengths(1600, 500))
    record(meter, "dropped", lengths(400, 560, seed=1))
    beyond = []
    for _ in range(30):
        beyond.append(abs(meter.metrics()["bias/tokens/dropped_shift_sd"]) >= MIN_SHIFT_SD)
        warned += meter.warning() is not None
        record(meter, "trained" if beyond[-1] else "dropped", [700] * 20)
    assert sum(b and not a for a, b in zip(beyond, beyond[1:], strict=False)) > 1
    assert warned == 1


def test_the_largest_shift_warns_first() -> None:
    meter = SelectionMeter()
    for i in range(600):
        lost: ResponseFate = "dropped" if i % 3 == 0 else "trained"
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


def test_a_cancelled_response_may_have_seconds_only() -> None:
    meter = SelectionMeter()
    for i in range(900):
        meter.record("trained", tokens=300, seconds=20 + i % 10, reward=0.5)
    for _ in range(300):
        meter.record("dropped", seconds=60)
    assert meter.metrics()["bias/dropped_share"] == 0.25
    assert "bias/tokens/dropped_mean" not in meter.metrics()
    assert "fewer seconds than all" in (meter.warning() or "")
    assert meter.warning() is None


def test_a_filter_may_select_by_reward_but_warns_if_it_selects_by_length() -> None:
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
    assert "responses were filtered" in line
    assert line.endswith("relax the filter if it is not meant to select by this quantity")


def test_a_drift_of_all_lengths_does_not_warn() -> None:
    """Later steps drop more and have longer samples, but within each step dropped samples are typical."""
    meter = SelectionMeter(window=500)
    for step in range(100):
        record(meter, "trained", lengths(100 - step // 2, 300 + 5 * step, seed=step))
        record(meter, "dropped", lengths(step // 2, 300 + 5 * step, seed=step + 1000))
        assert meter.warning() is None


def test_only_the_last_two_windows_count() -> None:
    meter = SelectionMeter(window=10)
    for value, mean in ((1000, 1000), (1, 500.5), (1, 1), (1, 1)):
        record(meter, "trained", [value] * 10)
        # The first sample of a new window discards the window before the last.
        assert meter.metrics()["bias/tokens/trained_mean"] == pytest.approx(mean)


def test_only_decided_samples_fill_a_window() -> None:
    meter = SelectionMeter(window=10)
    record(meter, "trained", [7] * 10)
    for _ in range(100):
        meter.record("finished", tokens=1)
    assert meter.metrics()["bias/tokens/trained_mean"] == 7
