# SPDX-License-Identifier: Apache-2.0
"""A side effect that fails is tried again after longer and longer pauses, and given up in the end."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.core.waits.retry import SAVE_PATIENCE_S, CheckpointTimes, Retry
from recipe.async_pipeline.errors import CheckpointError


def test_pauses_double_up_to_a_bound_until_it_is_given_up() -> None:
    retry, now = Retry(limit=6, first=2, longest=10), 100.0
    pauses, again = [], True
    while again:
        assert retry.is_due(now)
        again = retry.failed(now)
        assert not retry.is_due(now)
        pauses.append(retry.due - now)
        now = retry.due
    assert pauses == [2, 4, 8, 10, 10, 10]
    assert (retry.in_a_row, retry.total) == (6, 6)


def test_a_success_starts_over() -> None:
    retry = Retry(limit=2, first=1, longest=8)
    for now in range(0, 100, 10):
        assert retry.failed(now)
        retry.succeeded()
        assert retry.is_due(now)
    assert (retry.in_a_row, retry.total) == (0, 10)


def test_pauses_are_bounded_however_often_it_fails() -> None:
    retry = Retry(limit=10**6, first=1, longest=60)
    assert all(retry.failed(0.0) for _ in range(5000))
    assert retry.due == 60


def times(first_step: int = 1) -> CheckpointTimes:
    return CheckpointTimes(Schedule(batch=1, last_step=100, first_step=first_step, save_every=10))


def test_a_checkpoint_that_failed_is_tried_again_before_its_next_time() -> None:
    made = times()
    assert [step for step in range(1, 31) if made.saves(step)] == [10, 20, 30]
    made.failed(10, 10, 0.0)
    assert [step for step in range(10, 31) if made.saves(step)] == [10, 12, 20, 30]
    assert (made.failures, made.age(12)) == (1, 12)
    made.failed(12, 12, 1.0)
    made.failed(14, 14, 2.0)
    assert [step for step in range(15, 31) if made.saves(step)] == [18, 20, 30]
    made.succeeded(18)
    assert [step for step in range(15, 31) if made.saves(step)] == [20, 30]
    assert (made.failures, made.age(20), made.last) == (3, 2, 18)


def test_a_disk_that_stays_full_ends_the_run() -> None:
    made = times(first_step=6)
    for step in range(10, 30):
        made.failed(step, step, now_s=step)  # each step takes a second
    made.succeeded(30)
    for step in range(31, 40):
        made.failed(step, step, now_s=3000.0 + step)
    with pytest.raises(
        CheckpointError, match="last 10 checkpoints .* disk is full or fails; .* step 30: free space or"
    ):
        made.failed(40, 40, now_s=3031.0 + SAVE_PATIENCE_S)


def test_a_checkpoint_is_tried_again_at_a_step_that_no_stage_has_passed() -> None:
    made = times()
    made.failed(10, 15, 0.0)
    assert [step for step in range(10, 20) if made.saves(step)] == [10, 17]


def test_a_checkpoint_can_be_requested_for_the_next_step() -> None:
    made = times()
    assert made.request(newest=12) == 13
    assert [step for step in range(10, 20) if made.saves(step)] == [10, 13]
    made.succeeded(13)
    assert [step for step in range(13, 21) if made.saves(step)] == [20]
