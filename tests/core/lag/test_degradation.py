# SPDX-License-Identifier: Apache-2.0
"""Down after failures in a row, up after a clean stretch, one level at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.lag.degradation import Caution, Change, Level, StepDown


def test_down_two_levels_and_up_again() -> None:
    policy = StepDown(Caution(after=2, clean=3))
    assert policy.failed("a timeout") is None
    assert policy.failed("a timeout") == Change(
        Level.BLOCKING, "2 weight updates in a row failed; the last, because a timeout"
    )
    assert policy.failed("a crash") is None
    assert policy.failed("a crash") == Change(
        Level.ON_POLICY, "2 weight updates in a row failed; the last, because a crash"
    )
    assert [policy.failed("a crash") for _ in range(5)] == [None] * 5
    assert [policy.succeeded() for _ in range(2)] == [None, None]
    assert policy.succeeded() == Change(Level.BLOCKING, "3 weight updates in a row were good")
    assert [policy.succeeded() for _ in range(2)] == [None, None]
    assert policy.succeeded() == Change(Level.ASYNCHRONOUS, "3 weight updates in a row were good")
    assert policy.succeeded() is None


def test_a_good_publication_between_two_failures_restarts_the_count() -> None:
    policy = StepDown(Caution(after=2, clean=2))
    for _ in range(4):
        assert policy.failed("x") is None
        assert policy.succeeded() is None
    assert policy.level is Level.ASYNCHRONOUS


def test_zero_never_steps_down() -> None:
    policy = StepDown(Caution(after=0, clean=1))
    assert [policy.failed("x") for _ in range(9)] == [None] * 9


@pytest.mark.parametrize(("after", "clean"), [(-1, 1), (1, 0)])
def test_impossible_settings_are_refused(after: int, clean: int) -> None:
    with pytest.raises(ValueError, match="must be >= 0"):
        StepDown(Caution(after=after, clean=clean))


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.booleans(), max_size=60))
def test_each_change_is_one_level_and_says_so(after: int, clean: int, good: list[bool]) -> None:
    policy, before, run = StepDown(Caution(after=after, clean=clean)), Level.ASYNCHRONOUS, 0
    last: bool | None = None
    for is_good in good:
        change = policy.succeeded() if is_good else policy.failed("x")
        run = run + 1 if is_good == last else 1
        last = is_good
        if change is not None:
            assert change.level == policy.level == before + (-1 if is_good else 1)
            assert run >= (clean if is_good else after)
        else:
            assert policy.level == before
        before = policy.level
