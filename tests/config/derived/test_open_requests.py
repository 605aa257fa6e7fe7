# SPDX-License-Identifier: Apache-2.0
"""How the open requests of a replica are divided among the agent loop workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.config.derived.open_requests import OpenRequests
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig
from recipe.async_pipeline.errors import ConfigError

WORKERS = 8


def bounds(
    bound: int | None = None,
    *,
    engine_slots: int = 256,
    workers: int = WORKERS,
    groups_per_step: int = 512,
    responses_per_group: int = 16,
    max_lag: int = 1,
) -> OpenRequests:
    values = {"rollout.max_open_requests": bound, "staleness.max_lag": max_lag, "strategy": "fully_async"}
    return OpenRequests.of(
        AsyncPipelineConfig.of(values),
        engine_slots=engine_slots,
        workers=workers,
        groups_per_step=groups_per_step,
        responses_per_group=responses_per_group,
    )


def test_by_default_a_replica_holds_twice_what_it_generates() -> None:
    assert bounds() == OpenRequests(share=64, per_replica=512, groups=1024)


def test_the_knob_is_divided_among_the_workers() -> None:
    assert bounds(100) == OpenRequests(share=12, per_replica=96, groups=1024)


def test_each_worker_has_a_share_of_one_at_least() -> None:
    assert bounds(3) == OpenRequests(share=1, per_replica=WORKERS, groups=1024)


@pytest.mark.parametrize(("groups", "share"), [(1, 256), (2, 128), (3, 85), (4, 64), (5, 64)])
def test_workers_without_groups_have_no_share(groups: int, share: int) -> None:
    """With max_lag 1, two groups are in flight for each group of a step."""
    assert bounds(groups_per_step=groups).share == share


def test_by_default_a_whole_group_fits_in_a_share() -> None:
    assert bounds(engine_slots=64, responses_per_group=32).share == 32
    assert bounds(engine_slots=8, responses_per_group=32).share == 8, "but no more than the engine generates"


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 40), st.integers(1, 80), st.integers(0, 3))
def test_by_default_the_engine_does_not_run_dry(
    slots: int, workers: int, groups: int, answers: int, lag: int
) -> None:
    """If as many workers as possible use their shares, more is open than the engine generates at once."""
    made = bounds(
        engine_slots=slots,
        workers=workers,
        groups_per_step=groups,
        responses_per_group=answers,
        max_lag=lag,
    )
    assert made.share >= min(answers, slots)
    assert made.per_replica >= slots


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_open_requests must be >= 1 and .*, got 0"):
        bounds(0)
