# SPDX-License-Identifier: Apache-2.0
"""Versions only grow and keep their order; admission bounds the lag of every token."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.lag.staleness import (
    CALM,
    LagControl,
    VersionKind,
    Versions,
    check_lag,
    check_served,
)
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import StalenessViolation, VersionNotServed


def publish(versions: Versions, version: int) -> None:
    """Train, gather and serve a version at once."""
    versions.advance_trained(version)
    versions.advance_gathered(version)
    versions.advance_served(version)


async def settle() -> None:
    """Let everything run that can."""
    await asyncio.sleep(1)


# Lag.


@pytest.mark.parametrize("max_lag", range(4))
@pytest.mark.parametrize("step", range(1, 7))
@pytest.mark.parametrize("first_version", range(7))
def test_a_sample_passes_if_its_lag_is_between_zero_and_the_bound(
    step: int, first_version: int, max_lag: int
) -> None:
    found = step - 1 - first_version
    if 0 <= found <= max_lag:
        assert check_lag(step, first_version, max_lag, "trajectory a") == found
    else:
        with pytest.raises(StalenessViolation, match="trajectory a"):
            check_lag(step, first_version, max_lag, "trajectory a")


def test_a_violation_names_step_trajectory_lag_and_bound() -> None:
    with pytest.raises(StalenessViolation) as caught:
        check_lag(9, 5, 2, "trajectory u7:3")
    assert str(caught.value) == "step 9 got trajectory u7:3 of version 5: lag 3 exceeds max_lag 2"
    with pytest.raises(StalenessViolation, match="step 9 starts at version 8, but .* claims version 9"):
        check_lag(9, 9, 2, "trajectory u7:3")


# Versions.


def test_before_the_first_publication_nothing_is_gathered_or_served() -> None:
    versions = Versions()
    assert (versions.trained, versions.gathered, versions.served) == (0, -1, -1)


KIND = st.sampled_from(["trained", "gathered", "served"])


@given(st.lists(st.tuples(KIND, st.integers(-1, 6)), max_size=30))
def test_versions_only_grow_and_keep_their_order(moves: list[tuple[VersionKind, int]]) -> None:
    versions = Versions()
    model = {"trained": 0, "gathered": -1, "served": -1}
    ceiling = {"gathered": "trained", "served": "gathered"}
    for kind, version in moves:
        legal = version >= model[kind] and (kind == "trained" or version <= model[ceiling[kind]])
        advance = getattr(versions, f"advance_{kind}")
        if legal:
            advance(version)
            model[kind] = version
        else:
            with pytest.raises(StalenessViolation, match=str(version)):
                advance(version)
        assert {kind: getattr(versions, kind) for kind in model} == model
        assert versions.served <= versions.gathered <= versions.trained


def test_a_violation_of_the_order_says_what_is_missing() -> None:
    versions = Versions()
    with pytest.raises(StalenessViolation, match="version 1 cannot be gathered: only 0 is trained"):
        versions.advance_gathered(1)
    with pytest.raises(StalenessViolation, match="version 0 cannot be served: only -1 is gathered"):
        versions.advance_served(0)
    publish(versions, 3)
    with pytest.raises(StalenessViolation, match="served version cannot go back from 3 to 2"):
        versions.advance_served(2)


def test_wait_for_returns_at_once_if_the_version_is_reached() -> None:
    with pytest.raises(StopIteration):
        Versions().wait_for("trained", 0).send(None)


@given(
    wanted=st.lists(st.tuples(KIND, st.integers(0, 6)), max_size=12),
    steps=st.lists(st.integers(1, 3), max_size=6),
    cancelled=st.sets(st.integers(0, 11)),
)
def test_exactly_those_wake_whose_version_is_reached(
    wanted: list[tuple[VersionKind, int]], steps: list[int], cancelled: set[int]
) -> None:
    async def main() -> None:
        versions = Versions()
        tasks = [asyncio.create_task(versions.wait_for(kind, version)) for kind, version in wanted]
        await settle()
        for number in cancelled & set(range(len(tasks))):
            tasks[number].cancel()
        await settle()
        version = -1
        for kind, step in zip(["gathered", "served", "trained"] * 2, steps, strict=False):
            if kind == "trained":
                version = versions.trained + step
                versions.advance_trained(version)
            elif kind == "gathered":
                versions.advance_gathered(versions.trained)
            else:
                versions.advance_served(versions.gathered)
            await settle()
            for number, (task, (waited, wants)) in enumerate(zip(tasks, wanted, strict=True)):
                reached = getattr(versions, waited) >= wants
                assert task.done() == (reached or task.cancelled())
                assert task.cancelled() <= (number in cancelled)

    run_virtual(main())


def test_subscribers_hear_of_every_version_that_is_served() -> None:
    versions, heard = Versions(), []
    versions.subscribe(lambda: heard.append(versions.served))
    for version in range(3):
        publish(versions, version)
    assert heard == [0, 1, 2]


@pytest.mark.parametrize(
    ("served", "admitted", "refused"),
    [(None, None, False), (3, None, False), (3, 3, False), (4, 3, False), (3, 4, True), (None, 0, True)],
)
def test_a_replica_refuses_groups_that_were_admitted_with_newer_weights(
    served: int | None, admitted: int | None, refused: bool
) -> None:
    if not refused:
        check_served(served, admitted, "replica 1")
        return
    message = f"replica 1 serves version {served}, and the request requires version {admitted}; try another"
    with pytest.raises(VersionNotServed, match=message):
        check_served(served, admitted, "replica 1")


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
