# SPDX-License-Identifier: Apache-2.0
"""Spans of tokens, and the pairs of numbers that files have."""

from __future__ import annotations

from recipe.async_pipeline.core.token_spans import TokenSpan, pairs_of, spans_of


def test_pairs_become_spans_and_spans_pairs() -> None:
    spans = spans_of([[4, 0], (5, 30)])
    assert spans == (TokenSpan(version=4, start=0), TokenSpan(version=5, start=30))
    assert pairs_of(spans) == [[4, 0], [5, 30]]
    assert spans_of(pairs_of(spans)) == spans


def test_numbers_of_other_types_become_plain_ones() -> None:
    (span,) = spans_of([[4.0, True]])  # type: ignore[list-item]
    assert (type(span.version), type(span.start)) == (int, int)
