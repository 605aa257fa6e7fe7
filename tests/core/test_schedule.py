# SPDX-License-Identifier: Apache-2.0
"""Every decision of a schedule, over all small cases."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from recipe.async_pipeline.core.lag.staleness import Versions
from recipe.async_pipeline.core.schedule import Schedule, synchronous
from recipe.async_pipeline.strategies import FullyAsync
from tests.fakes.queue_order import order_of, recall_of_a_straggler

LAST = 13
CASES = list(product(range(1, 6), range(1, 5), range(4), range(4)))


def schedule(**fields: Any) -> Schedule:
    return Schedule(**{"batch": 4, "last_step": LAST, "max_lag": 3, **fields})


@pytest.mark.parametrize(("first", "sync", "refresh", "validate"), CASES)
def test_what_is_published(first: int, sync: int, refresh: int, validate: int) -> None:
    one = schedule(first_step=first, sync_every=sync, ref_refresh_every=refresh, validate_every=validate)
    published = [v for v in range(LAST + 1) if one.publishes(v)]
    assert published[:first] == list(range(first)), "what the run starts with"
    assert published[-1] == LAST
    assert {v for v in range(first, LAST) if v % sync == 0} <= set(published)
    assert {one.reference(step) or 0 for step in range(first, LAST + 1)} <= set(published)
    assert {v for v in range(LAST + 1) if one.validates(v)} <= set(published)
    for version in range(1, LAST + 1):
        assert one.publication_before(version) == max(v for v in published if v < version)


@pytest.mark.parametrize(("first", "sync", "refresh", "validate"), CASES)
def test_old_log_probs_of_a_copy_are_of_a_published_version_before_the_step(
    first: int, sync: int, refresh: int, validate: int
) -> None:
    one = schedule(
        first_step=first,
        sync_every=sync,
        ref_refresh_every=refresh,
        validate_every=validate,
        old_logp="logp_pool",
    )
    for step in range(first, LAST + 1):
        version = one.old_policy(step)
        assert version is not None and one.publishes(version)
        assert version <= max(first - 1, step - 2), "it can be computed while the step before trains"
        assert version >= first - 1, "a copy elsewhere holds nothing older"


def test_old_log_probs_elsewhere() -> None:
    assert [schedule().old_policy(step) for step in (1, 2, 9)] == [0, 1, 8]
    assert schedule(old_logp="rollout").old_policy(3) is None


def test_the_reference_is_replaced_now_and_then() -> None:
    assert [schedule(ref_refresh_every=3).reference(step) for step in range(1, 10)] == (
        [None, None, None, 3, 3, 3, 6, 6, 6]
    )
    assert schedule().reference(9) is None


def test_validations_and_checkpoints() -> None:
    one = schedule(validate_every=5, save_every=6)
    assert [v for v in range(LAST + 1) if one.validates(v)] == [5, 10, LAST]
    assert [v for v in range(1, LAST + 1) if one.saves(v)] == [6, 12, LAST]
    assert schedule(validate_first=True).validates(0)
    assert not any(schedule().validates(v) or schedule().saves(v) for v in range(1, LAST + 1))


def test_the_queue_is_set_by_the_schedule() -> None:
    queue = FullyAsync(batch=4, last_step=9, max_lag=3, depth=2, straggler="drop").queue(Versions())
    assert (queue.batch, queue.max_lag, queue.depth) == (4, 3, 2)
    versions = Versions()
    assert order_of(FullyAsync(batch=4, last_step=9, max_lag=3).queue(versions), versions) == "finished"
    versions = Versions()
    dropping = schedule(max_lag=3, straggler="drop").queue(versions)
    assert recall_of_a_straggler(dropping, versions).verdict == "drop"
    assert schedule(max_lag=1, depth=5).queue(Versions()).depth == 1


def test_without_asynchrony_nothing_lags() -> None:
    one = synchronous(FullyAsync(batch=4, last_step=9, max_lag=3, depth=2, oldest_share=0.5, sync_every=2))
    assert isinstance(one, FullyAsync)
    assert (one.max_lag, one.depth, one.oldest_share, one.sync_every) == (0, None, 1.0, 2)
    assert one.queue(Versions()).max_lag == 0
