# SPDX-License-Identifier: Apache-2.0
"""Spans can be read after their process was killed, and the union of intervals is correct."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.lab.bench.measuring import spans
from recipe.async_pipeline.lab.bench.measuring.spans import (
    SPANS_DIR,
    MeasuredSpan,
    SpanFile,
    read_spans,
    union,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: (float(p[0]), float(sum(p))))
)


def seconds(intervals: list[tuple[float, float]]) -> set[int]:
    return {second for start, end in intervals for second in range(int(start), int(end))}


@given(INTERVALS)
def test_the_union_is_disjoint_and_ordered_and_covers_the_same_seconds(
    intervals: list[tuple[float, float]],
) -> None:
    merged = union(intervals)
    assert all(a[1] < b[0] for a, b in zip(merged, merged[1:], strict=False))
    assert sum(end - start for start, end in merged) == len(seconds(intervals))


def test_spans_are_read_in_order_of_their_end(tmp_path: Path) -> None:
    file = SpanFile(tmp_path)
    file.add("late", 2.0, 3.0, step=1)
    file.add("early", 0.0, 1.0)
    assert read_spans(tmp_path) == [
        MeasuredSpan("early", 0.0, 1.0, {}),
        MeasuredSpan("late", 2.0, 3.0, {"step": 1}),
    ]


def test_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    SpanFile(tmp_path).add("whole", 0.0, 1.0)
    (tmp_path / "spans-1.jsonl").write_text('["half", 1.0, 2')
    assert [span.name for span in read_spans(tmp_path)] == ["whole"]


def test_a_body_that_raises_has_a_span(tmp_path: Path) -> None:
    file = SpanFile(tmp_path)
    with pytest.raises(ValueError), file.measure("body", step=3):
        raise ValueError
    (span,) = read_spans(tmp_path)
    assert (span.name, span.facts) == ("body", {"step": 3})
    assert span.seconds >= 0


def test_a_process_writes_to_the_directory_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans.of_this_job.cache_clear()
    monkeypatch.setenv(SPANS_DIR, str(tmp_path))
    spans.of_this_job().add("x", 0.0, 1.0)
    spans.of_this_job.cache_clear()
    assert [span.name for span in read_spans(tmp_path)] == ["x"]
