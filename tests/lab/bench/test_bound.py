# SPDX-License-Identifier: Apache-2.0
"""The bound: each of its three terms, and a simulated schedule that does not beat it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.lab.bench.bound import StageWork, bound_terms

WAITS = StageWork(
    tail_s=6.0, group_s=2.0, train_s=1.0, update_s=0.7, weights_s=0.1, generate_cpu_s=0.5, cpu_s=1.5
)
SECONDS = st.floats(0, 100)


def bound(work: StageWork, in_flight: int, *, shared: bool = False, bounded: bool = True) -> float:
    terms = bound_terms(
        work, batches_in_flight=in_flight, bounded_lag=bounded, shared_devices=shared, cores=2, devices=2
    )
    return max(terms.values())


def test_on_policy_adds_up_all_latencies() -> None:
    assert bound(WAITS, 1) == pytest.approx(6.8)


def test_batches_in_flight_divide_the_loop() -> None:
    assert bound(WAITS, 2) == pytest.approx(3.4)
    assert bound(WAITS, 4) == pytest.approx(6.8 / 4)


def test_without_a_lag_bound_the_mean_latency_counts() -> None:
    assert bound(WAITS, 2, bounded=False) == pytest.approx(2.8 / 2)


def test_the_trainer_can_be_the_bound() -> None:
    assert bound(WAITS, 100) == 1.0


def test_the_generator_can_be_the_bound() -> None:
    assert bound(WAITS._replace(generate_cpu_s=3.0), 100) == 3.0


def test_the_cores_can_be_the_bound() -> None:
    assert bound(WAITS._replace(cpu_s=9.0), 100) == 4.5


def test_shared_devices_add_up_training_and_generation() -> None:
    assert bound(WAITS._replace(generate_cpu_s=3.0), 100, shared=True) == pytest.approx(1.0 + 1.5)


@given(st.tuples(*[SECONDS] * len(StageWork._fields)), st.integers(1, 9), st.booleans(), st.booleans())
def test_the_bound_is_monotonic_in_lag_and_work(
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
def test_a_strict_schedule_is_never_faster_than_the_bound(
    answers: list[list[float]], in_flight: int, update_s: float, weights_s: float
) -> None:
    """Simulate a trainer that takes whole batches in order and scores in no time."""
    begun = [0.0] * in_flight
    trained = 0.0
    for batch in answers:
        trained = max(trained, begun.pop(0) + max(batch)) + update_s
        begun.append(trained + weights_s)
    tail = sum(map(max, answers)) / len(answers)
    work = StageWork(tail, 0.0, update_s, update_s, weights_s, 0.0, 0.0)
    # The first batches only fill the pipeline.
    assert trained + weights_s >= bound(work, in_flight) * (len(answers) - in_flight + 1) - max(
        map(max, answers)
    )
