# SPDX-License-Identifier: Apache-2.0
"""When the effective sample size of the steps changes how many batches are ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.lag.lag_control import CALM, LagControl


def test_a_low_share_costs_one_batch_and_then_waits_for_what_was_in_flight() -> None:
    control = LagControl(0.5, least=0, most=3)
    assert control.trained(1, 0.6) is None
    assert "it fell to 0.4, below 0.5" in str(control.trained(2, 0.4))
    assert control.depth == 2
    assert [control.trained(step, 0.1) for step in range(3, 7)] == [None] * 4, "admitted before"
    assert control.trained(7, 0.1) and control.depth == 1


def test_it_ends_at_the_least() -> None:
    control = LagControl(0.5, least=1, most=2)
    for step in range(1, 50):
        control.trained(step, 0.0)
    assert control.depth == 1


def test_a_calm_time_brings_a_batch_back_and_a_failed_attempt_doubles_the_wait() -> None:
    control, raised = LagControl(0.5, least=0, most=1), list[int]()
    for step in range(1, 200):
        before = control.depth
        control.trained(step, 0.4 if control.depth else 0.9)
        if control.depth > before:
            raised.append(step)
    waits = [after - before for before, after in zip(raised, raised[1:], strict=False)]
    assert len(waits) > 2 and all(
        after > 1.5 * before for before, after in zip(waits, waits[1:], strict=False)
    )
    assert raised[0] > CALM


@pytest.mark.parametrize("share", [None, 0.0])
def test_nothing_changes_without_a_floor_or_a_measurement(share: float | None) -> None:
    control = LagControl(None if share is not None else 0.5, least=0, most=3, depth=3)
    assert all(control.trained(step, share) is None for step in range(1, 30)) and control.depth == 3


def test_a_resumed_run_continues_where_it_was_within_its_bounds() -> None:
    assert LagControl(0.5, least=0, most=3, depth=1).depth == 1
    assert LagControl(0.5, least=0, most=2, depth=5).depth == 2
    assert LagControl(None, least=0, most=3, depth=1).depth == 3


@given(st.integers(0, 2), st.integers(0, 5), st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=300))
def test_the_bounds_hold(least: int, most: int, shares: list[float | None]) -> None:
    control = LagControl(0.5, least=least, most=most)
    for step, share in enumerate(shares):
        before, why = control.depth, control.trained(step, share)
        assert min(least, most) <= control.depth <= most
        assert abs(control.depth - before) == (why is not None)
