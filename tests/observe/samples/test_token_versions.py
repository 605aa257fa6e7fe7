# SPDX-License-Identifier: Apache-2.0
"""Every generated token has the version of its span, or of the oldest span if the spans are not complete."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from recipe.async_pipeline.core.groups.items import Trajectory, spans_of
from recipe.async_pipeline.observe.samples.token_versions import TokenVersions, versions_written

Spans = Sequence[Sequence[int]] | None


def written(*rows: tuple[Spans, Sequence[int]]) -> TokenVersions:
    """Return what some trajectories of version 3 to 5 have written; each has spans and a mask."""
    trajectories = [
        Trajectory(
            key="",
            first_version=3,
            last_version=5,
            num_tokens=len(mask),
            spans=None if spans is None else spans_of(spans),
        )
        for spans, mask in rows
    ]
    lengths = np.array([len(mask) for _, mask in rows], dtype=np.int64)
    generated = np.array([one for _, mask in rows for one in mask], dtype=bool)
    return versions_written(trajectories, lengths, generated)


def by_token(found: TokenVersions) -> list[int]:
    return list(np.repeat(found.versions, found.tokens))


INCOMPLETE: list[Spans] = [None, [], [[3, 0], [4, 1]], [[4, 4]], [[3, 0], [4, 4], [5, 0]], [[3, -1], [4, 4]]]


@pytest.mark.parametrize("spans", INCOMPLETE)
def test_incomplete_spans_make_every_token_as_old_as_the_oldest_and_leave_others_alone(spans: Spans) -> None:
    whole: tuple[Spans, list[int]] = ([[4, 0], [5, 2]], [1, 1, 1])
    found = written(whole, (spans, [1, 1, 0, 0, 1, 1]), whole, ([[5, 0]], []), whole)
    assert found.known.tolist() == [True, False, True, True, True]
    assert by_token(found) == [4, 4, 5, 3, 3, 3, 3, 4, 4, 5, 4, 4, 5]
    assert found.changes().tolist() == [1, 0, 1, 0, 1]
    assert found.row_tokens.tolist() == [3, 4, 3, 0, 3]


def test_a_span_behind_a_truncated_response_is_not_the_start_of_the_next() -> None:
    found = written(([[4, 0], [5, 2]], [1, 1]), ([[5, 1]], [1, 1]))
    assert found.known.tolist() == [True, False]
    assert by_token(found) == [4, 4, 3, 3]
