# SPDX-License-Identifier: Apache-2.0
"""Drift is found in the turn where it begins, and only in turns that the trainer's own version wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.core.groups.items import Group, StepBatch, Trajectory, plain
from recipe.async_pipeline.observe.samples.drift import (
    CLIP_FRACTION,
    SHOWN_TURNS,
    DriftMeter,
    PrecisionCheck,
    bound_of,
)
from recipe.async_pipeline.observe.samples.off_policy import Columns

TRAINER = 7
Episode = Sequence[tuple[int, Sequence[float]]]
"""Turns: the version that wrote it, and the difference of the log-probs of each token."""


def trajectory(turns: Episode, key: str = "a") -> Trajectory:
    spans, at = [], 0
    for version, tokens in turns:
        spans.append((version, at))
        at += len(tokens) + 2  # an observation of two tokens after each turn
    versions = [version for version, _ in turns]
    return Trajectory(
        key=key, first_version=min(versions), last_version=max(versions), num_tokens=at, spans=plain(spans)
    )


def measured(*episodes: Episode, bound: float = 0.05, parts: int = 1, with_forms: str = "") -> DriftMeter:
    """`with_forms`: keys of episodes, which are a, b, c in their order."""
    meter = DriftMeter(TRAINER, bound, with_forms)
    size = -(-len(episodes) // parts)
    for begin in range(0, len(episodes), size):
        some = episodes[begin : begin + size]
        mask, old = list[int](), list[float]()
        for turns in some:
            for _, tokens in turns:
                mask += [1] * len(tokens) + [0, 0]
                old += [-1.0 + one for one in tokens] + [50.0, 50.0]
        lengths = np.array([sum(len(tokens) + 2 for _, tokens in turns) for turns in some])
        rollout = np.where(np.array(mask) == 1, -1.0, 0.0)
        columns = Columns(lengths, np.array(mask), rollout, np.array(old))
        keys = (chr(ord("a") + begin + i) for i in range(size))
        meter.add([trajectory(*one) for one in zip(some, keys, strict=False)], columns)
    return meter


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_largest_difference_of_each_turn(parts: int) -> None:
    meter = measured(
        [(7, [0.01, -0.02]), (7, [0.5])],
        [(7, [0.0]), (7, [-1.5, 0.0]), (7, [0.25])],
        [(7, [0.03])],
        parts=parts,
    )
    assert meter.metrics() == pytest.approx(
        {"drift/max": 1.5, "drift/turn_1": 0.03, "drift/turn_2": 1.5, "drift/turn_3": 0.25}
    )
    warning = meter.warning()
    assert warning is not None and warning.startswith("drift: in turn 2, ")
    assert "up to 1.5 on the same weights (2 of 3 tokens above 0.05)" in warning
    assert warning.endswith("what is inserted between turns 1 and 2")


def test_the_first_turn_has_its_own_advice() -> None:
    warning = measured([(7, [1.0, 1.0])]).warning()
    assert warning is not None and "in turn 1" in warning and "chat template" in warning


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("with_forms", "turn", "why"),
    [
        ("", 1, "compare the prompt's chat template"),
        ("a", 2, "what is inserted between turns 1 and 2"),
        ("ab", 1, "a form of the answer (response_format or tool_choice)"),
        ("abc", 1, "a form of the answer (response_format or tool_choice)"),
    ],
)
def test_forms_are_named_as_the_cause_if_nothing_else_drifts(
    with_forms: str, turn: int, why: str, parts: int
) -> None:
    episodes: list[Episode] = [[(7, [1.0, 1.0]), (7, [0.0])], [(7, [0.0]), (7, [2.0, 2.0])], [(7, [0.0])]]
    meter = measured(*episodes, parts=parts, with_forms=with_forms)
    warning = meter.warning()
    assert warning is not None and f"in turn {turn}, " in warning and why in warning
    assert ("the tokens that the engine saw" in warning) == (with_forms in ("", "a"))
    assert meter.metrics()["drift/max"] == 2.0, "of all episodes"


def test_turns_of_other_versions_are_not_compared() -> None:
    meter = measured([(6, [3.0]), (7, [0.01]), (6, [3.0])])
    assert meter.metrics() == pytest.approx({"drift/max": 0.01, "drift/turn_2": 0.01})
    assert measured([(6, [3.0])]).metrics() == {}


def test_a_turn_during_which_the_weights_changed_is_not_compared() -> None:
    meter = DriftMeter(TRAINER, 0.05)
    one = Trajectory(key="a", first_version=6, last_version=7, num_tokens=4, spans=plain(((6, 0), (7, 1))))
    ones = np.ones(4)
    meter.add([one], Columns(np.array([4]), ones, ones, ones + 3))
    assert meter.metrics() == {}


def test_single_tokens_are_no_drift() -> None:
    assert measured([(7, [0.0] * 99 + [2.0])]).warning() is None
    assert measured([(7, [0.0] * 60 + [2.0] * 2)]).warning() is not None
    assert measured([(7, [0.0] * 300 + [2.0] * 2)]).warning() is None


def test_values_that_are_not_finite_are_left_to_other_checks() -> None:
    assert measured([(7, [0.01, float("nan")]), (7, [0.02])]).metrics() == pytest.approx(
        {"drift/max": 0.02, "drift/turn_2": 0.02}
    )


def test_late_turns_have_no_separate_metric() -> None:
    found = measured([(7, [0.01])] * SHOWN_TURNS + [(7, [0.5, 0.5])]).metrics()
    assert found["drift/max"] == 0.5 and len(found) == 1 + SHOWN_TURNS


def test_without_log_probs_or_tokens_there_is_nothing_to_compare() -> None:
    meter = DriftMeter(TRAINER, 0.05)
    meter.add([trajectory([(7, [0.0])])], Columns(np.array([3]), np.array([1, 0, 0])))
    zeros = np.zeros(3)
    meter.add([trajectory([(7, [0.0])])], Columns(np.array([3]), zeros, zeros, zeros))
    assert meter.metrics() == {} and meter.warning() is None


def test_bounds() -> None:
    assert bound_of("float32", "fp32") < bound_of("bfloat16", "fp32") == bound_of(None, "fp32")


EPISODES = st.lists(
    st.lists(
        st.tuples(st.sampled_from([6, 7]), st.lists(st.floats(-2, 2), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(EPISODES, st.integers(1, 4))
def test_the_metrics_match_a_loop_over_the_tokens(episodes: list[Episode], parts: int) -> None:
    largest: dict[int, float] = {}
    for turns in episodes:
        for n, (version, tokens) in enumerate(turns, 1):
            if version == TRAINER:
                largest[n] = max(largest.get(n, 0.0), *(abs(one) for one in tokens))
    expected = {f"drift/turn_{n}": value for n, value in largest.items()}
    if largest:
        expected["drift/max"] = max(largest.values())
    assert measured(*episodes, parts=parts).metrics() == pytest.approx(expected, abs=1e-12)


def batch(*versions: int, step: int = 5, clipped: float | None = 0.4) -> StepBatch:
    trajectories = tuple(
        Trajectory(key=f"a_{n}_0", first_version=version, last_version=step - 1, num_tokens=3)
        for n, version in enumerate(versions)
    )
    metrics = {} if clipped is None else {CLIP_FRACTION: clipped}
    group = Group(uid="a", step=step, trajectories=trajectories)
    return StepBatch(step=step, groups=(group,), metrics=metrics)


def test_it_is_reported_once() -> None:
    check = PrecisionCheck("bfloat16", "fp32", 1e-3)
    text = check.warning(batch(4, 4))
    assert text is not None and text.startswith("precision: 40% of the steps")
    assert "engine (bfloat16)" in text and "trainer (fp32)" in text and "range 0.001;" in text
    assert check.warning(batch(4, 4)) is None


@pytest.mark.parametrize(
    "other", [batch(4, 3), batch(4, clipped=0.0), batch(4, clipped=0.01), batch(4, clipped=None)]
)
def test_older_images_and_little_clipping_are_expected(other: StepBatch) -> None:
    check = PrecisionCheck("bfloat16", "fp32", 1e-3)
    assert check.warning(other) is None
    assert check.warning(batch(4)) is not None, "it still looks"
