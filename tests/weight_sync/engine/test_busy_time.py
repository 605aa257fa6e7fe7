# SPDX-License-Identifier: Apache-2.0
"""Open time is the union of requests, however they overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.weight_sync.engine.busy_time import OpenTime


def test_requests_that_overlap_count_once_and_taking_splits_one_that_is_open() -> None:
    time = OpenTime()
    time.begin(1.0)
    time.begin(2.0)
    time.end(3.0)
    assert time.take(4.0) == 3.0
    time.end(6.0)
    time.begin(10.0)
    assert time.take(10.5) == 2.5
    assert time.take(10.5) == 0.0


def test_an_end_without_a_beginning_is_refused() -> None:
    with pytest.raises(ValueError, match="none was open"):
        OpenTime().end(1.0)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=12),
    st.sets(st.integers(0, 80), max_size=4),
)
def test_whatever_overlaps_the_union_is_counted(spans: list[tuple[int, int]], asked: set[int]) -> None:
    time, total = OpenTime(), 0.0
    moments = [(begin, 1) for begin, _ in spans] + [(begin + length, 0) for begin, length in spans]
    for moment, kind in sorted([*moments, *((at, 2) for at in asked)], key=lambda m: (m[0], m[1] == 0)):
        if kind == 2:
            total += time.take(float(moment))
        elif kind == 1:
            time.begin(float(moment))
        else:
            time.end(float(moment))
    assert total + time.take(100.0) == len(
        {at for begin, length in spans for at in range(begin, begin + length)}
    )
