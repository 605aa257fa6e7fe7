# SPDX-License-Identifier: Apache-2.0
"""Stalls during weight updates, on timelines that can be checked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.lab.bench.measuring.spans import MeasuredSpan
from recipe.async_pipeline.lab.bench.measuring.stalls import (
    costs,
    noise,
    pauses_of,
    stall_in,
    summary,
    usual_pause,
)


def step(pid: int, start: float, end: float) -> MeasuredSpan:
    return MeasuredSpan("engine_step", start, end, {"pid": pid})


def steps(pid: int, *holes: tuple[float, float], until: int = 40) -> list[MeasuredSpan]:
    """Return a step of 0.9 s every second, except steps that would touch a hole."""
    made = [step(pid, t, t + 0.9) for t in range(until)]
    return [s for s in made if not any(s.start < end and start < s.end for start, end in holes)]


def publication(start: float, end: float, **facts: float) -> MeasuredSpan:
    return MeasuredSpan("publication", start, end, {"trainer_stall": 0.5, **facts})


def test_a_hole_around_a_weight_update_is_a_stall() -> None:
    spans = [*steps(1, (10, 13)), *steps(2), publication(10.5, 12.5)]
    (cost,) = costs(spans, warmup=0)
    assert cost.seconds == 2.0
    assert cost.trainer_stall == 0.5
    # Replica 1 pauses from 9.9 to 13 instead of for 0.1 s, as its steps at 10, 11 and 12 are missing. Replica
    # 2 has only usual pauses.
    assert cost.generator_stall == pytest.approx(3.0)


def test_a_hole_elsewhere_is_not_a_stall() -> None:
    (cost,) = costs([*steps(1, (20, 25)), publication(10.5, 12.5)], warmup=0)
    assert cost.generator_stall == pytest.approx(0.0)


def test_pauses_that_also_occur_without_an_update_do_not_count() -> None:
    # Every tenth pause is 0.6 s instead of 0.1, also without an update: 0.05 s per second.
    made, at = [], 0.0
    for number in range(400):
        made.append(step(1, at, at + 0.9))
        at += 1.5 if number % 10 == 9 else 1.0
    pauses = pauses_of([(s.start, s.end) for s in made])
    assert noise(pauses, [(100, 200)]) == pytest.approx(0.5 / 10.5, rel=0.1)
    (cost,) = costs([*made, publication(100, 200)], warmup=0)
    assert cost.generator_stall == pytest.approx(0.0, abs=0.6)
    (cost,) = costs([*[s for s in made if not 150 < s.start < 160], publication(100, 200)], warmup=0)
    assert cost.generator_stall == pytest.approx(10.0, abs=1.6)


def test_stalls_add_up_over_replicas_and_warm_up_is_skipped() -> None:
    spans = [
        *steps(1, (10, 12), (30, 31)),
        *steps(2, (11, 12), (31, 33)),
        publication(10.2, 11.8),
        publication(30.2, 32),
    ]
    first, second = costs(spans, warmup=0)
    assert first.generator_stall == pytest.approx(2.0 + 1.0)
    assert costs(spans, warmup=1) == [second]


def test_the_updates_of_one_way_are_counted_without_the_others() -> None:
    spans = [
        *steps(1, (10, 13), (20, 26)),
        publication(10.5, 12.5, way="a"),  # type: ignore[arg-type]
        publication(20.5, 25.5, way="b"),  # type: ignore[arg-type]
        publication(30.5, 31.5, way="a"),  # type: ignore[arg-type]
    ]
    assert [cost.seconds for cost in costs(spans, 0, "a")] == [2.0, 1.0]
    assert [cost.generator_stall for cost in costs(spans, 1, "a")] == [0.0]
    (other,) = costs(spans, 0, "b")
    assert other.generator_stall == pytest.approx(6.0)
    assert "way" not in other.facts


@given(st.lists(st.floats(0.001, 5), min_size=2, max_size=20), st.floats(0, 60), st.floats(0.1, 10))
def test_a_stall_is_never_longer_than_the_pauses(gaps: list[float], start: float, length: float) -> None:
    at, made = 0.0, []
    for gap in gaps:
        made.append((at, at + 1))
        at += 1 + gap
    pauses = pauses_of(made)
    window = (start, start + length)
    stall = stall_in(pauses, window, usual_pause(pauses, [window]), noise(pauses, [window]))
    assert 0 <= stall <= sum(end - begin for begin, end in pauses)


def test_the_hidden_fraction_is_work_without_stalls() -> None:
    facts = {
        "bytes": 4e9,
        "replicas": 2,
        "gather_s": 1.0,
        "transfer_s": 2.0,
        "load_s": 1.0,
        "commit_s": 0.8,
        "stall_s": 0.75,
        "prove_s": 0.25,
        "tokens_read_again": 7,
        "shm_bytes": 9e9,
    }
    spans = [*steps(1, (10, 11)), publication(10.2, 10.8, **facts)]
    row = summary(costs(spans, warmup=0))
    assert row["hidden_fraction"]["median"] == pytest.approx(1 - (0.5 + 1.0) / 4.0)
    assert (row["gather_gb_s"], row["transfer_gb_s"], row["load_gb_s"]) == pytest.approx((4.0, 4.0, 8.0))
    assert row["tokens_read_again"] == 7
    assert row["unhidden_s"] == pytest.approx(
        {"gather": 1.0, "call": -0.5, "copy": 0.5, "verification": 0.25, "around": 0.25}
    )
    assert row["commit_s"]["median"] == 0.8
    assert (row["host_memory_bytes"], row["host_memory_versions"]) == (9e9, 2.25)
    assert row["trainer_stall_s"] == {"median": 0.5, "min": 0.5, "max": 0.5}


def test_without_steps_the_stall_that_the_replicas_report_counts() -> None:
    reports, silent = publication(1, 2, stall_s=0.25), publication(3, 4)
    assert [cost.generator_stall for cost in costs([reports, silent], warmup=0)] == [0.25, None]
    assert "generator_stall_s" not in summary(costs([silent], warmup=0))


def test_a_way_without_parts_has_only_stalls() -> None:
    assert set(summary(costs([*steps(1), publication(1, 2)], warmup=0))) == {
        "trainer_stall_s",
        "generator_stall_s",
        "publication_s",
    }
