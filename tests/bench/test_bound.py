# SPDX-License-Identifier: Apache-2.0
"""The bound: each of its three reasons, and that no schedule beats the one of the loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.bench.bound import StageWork, bound_terms

WAITS = StageWork(
    tail_s=6.0, group_s=2.0, train_s=1.0, update_s=0.7, weights_s=0.1, generate_cpu_s=0.5, cpu_s=1.5
)
SECONDS = st.floats(0, 100)


def bound(work: StageWork, in_flight: int, *, shared: bool = False, bounded: bool = True) -> float:
    terms = bound_terms(
        work, batches_in_flight=in_flight, bounded_lag=bounded, shared_devices=shared, cores=2, devices=2
    )
    return max(terms.values())


def test_on_policy_waits_for_everything_in_turn() -> None:
    assert bound(WAITS, 1) == pytest.approx(6.8)


def test_batches_in_flight_share_the_wait() -> None:
    assert bound(WAITS, 2) == pytest.approx(3.4)
    assert bound(WAITS, 4) == pytest.approx(6.8 / 4)


def test_without_a_bound_of_the_lag_only_the_average_answer_counts() -> None:
    assert bound(WAITS, 2, bounded=False) == pytest.approx(2.8 / 2)


def test_at_last_the_trainer_is_the_bound() -> None:
    assert bound(WAITS, 100) == 1.0


def test_or_the_generator() -> None:
    assert bound(WAITS._replace(generate_cpu_s=3.0), 100) == 3.0


def test_or_the_cores() -> None:
    assert bound(WAITS._replace(cpu_s=9.0), 100) == 4.5


def test_on_shared_devices_training_and_generation_take_turns() -> None:
    assert bound(WAITS._replace(generate_cpu_s=3.0), 100, shared=True) == pytest.approx(1.0 + 1.5)


@given(st.tuples(*[SECONDS] * len(StageWork._fields)), st.integers(1, 9), st.booleans(), st.booleans())
def test_more_lag_never_hurts_and_more_work_never_helps(
    costs: tuple[float, ...], in_flight: int, shared: bool, bounded: bool
) -> None:
    work = StageWork(*costs)
    here = bound(work, in_flight, shared=shared, bounded=bounded)
    assert bound(work, in_flight + 1, shared=shared, bounded=bounded) <= here
    for field in StageWork._fields:
        assert (
            bound(
                work._replace(**{field: getattr(work, field) + 1.0}),
                in_flight,
                shared=shared,
                bounded=bounded,
            )
            >= here
        )


@given(
    st.lists(st.lists(st.floats(0, 20), min_size=2, max_size=2), min_size=40, max_size=60),
    st.integers(1, 5),
    st.floats(0.1, 3),
    st.floats(0, 1),
)
def test_whole_batches_in_order_are_never_faster(
    answers: list[list[float]], in_flight: int, update_s: float, weights_s: float
) -> None:
    """The schedule of a strict trainer that scores for nothing, played through."""
    begun = [0.0] * in_flight
    trained = 0.0
    for batch in answers:
        trained = max(trained, begun.pop(0) + max(batch)) + update_s
        begun.append(trained + weights_s)
    tail = sum(map(max, answers)) / len(answers)
    work = StageWork(tail, 0.0, update_s, update_s, weights_s, 0.0, 0.0)
    # The pipeline is filled once for nothing.
    assert trained + weights_s >= bound(work, in_flight) * (len(answers) - in_flight + 1) - max(
        map(max, answers)
    )
