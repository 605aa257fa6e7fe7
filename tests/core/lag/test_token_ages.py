# SPDX-License-Identifier: Apache-2.0
"""Spans of versions, and which tokens a mask leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recipe.async_pipeline.core.groups.items import Group, Trajectory, spans_of
from recipe.async_pipeline.core.lag.token_ages import (
    AgedTokens,
    masked,
    newest,
    oldest_in,
    oldest_trained,
    with_masks,
    written,
)

Spans = Sequence[tuple[int, int]]


def answer(spans: Spans | None, tokens: int = 100, before: int = 0) -> Trajectory:
    versions = [version for version, _ in spans or [(4, 0), (6, 0)]]
    return Trajectory(
        key="a",
        first_version=min(versions),
        last_version=max(versions),
        num_tokens=tokens,
        spans=None if spans is None else spans_of(spans),
        masked_before=before,
    )


SPANS = [(4, 0), (5, 30), (6, 70)]


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        (SPANS, [(4, 0, 30), (5, 30, 70), (6, 70, 100)]),
        ([(4, 0), (5, 0), (6, 70)], [(5, 0, 70), (6, 70, 100)]),
        ([(4, 0), (5, 100)], [(4, 0, 100)]),
        ([(4, 0), (5, 130)], [(4, 0, 100)]),
        (None, [(4, 0, 100)]),
    ],
    ids=["in order", "empty span", "empty at the end", "cut off", "unknown"],
)
def test_empty_spans_wrote_nothing(spans: Spans | None, found: list[tuple[int, int, int]]) -> None:
    assert list(written(answer(spans))) == [AgedTokens(*one) for one in found]


@pytest.mark.parametrize(
    ("spans", "before", "left_out", "oldest"),
    [
        (SPANS, 0, [], 4),
        (SPANS, 4, [], 4),
        (SPANS, 5, [(0, 30)], 5),
        (SPANS, 7, [(0, 30), (30, 70), (70, 100)], None),
        ([(5, 0), (4, 30), (6, 70)], 5, [(30, 70)], 5),
        ([(4, 0), (6, 100)], 5, [(0, 100)], None),
        (None, 5, [(0, 100)], None),
    ],
    ids=[
        "no mask",
        "nothing older",
        "the first",
        "all",
        "a replica behind",
        "no token of the last",
        "unknown",
    ],
)
def test_a_mask_leaves_out_what_older_versions_wrote(
    spans: Spans | None, before: int, left_out: list[tuple[int, int]], oldest: int | None
) -> None:
    one = answer(spans, before=before)
    assert masked(one) == left_out
    assert oldest_trained(one) == oldest


def test_only_trajectories_with_older_tokens_get_a_mask() -> None:
    group = Group(uid="g", step=1, trajectories=(answer(SPANS), answer([(6, 0)])))
    assert with_masks(group, 4) is group
    found = with_masks(group, 5)
    assert [one.masked_before for one in found.trajectories] == [5, 0]
    assert oldest_in(found.trajectories) == 5
    assert oldest_in(with_masks(group, 7).trajectories) is None
    assert newest(group) == 6
    assert newest(Group(uid="g", step=1, trajectories=(answer([(4, 0), (6, 100)]),))) == 4
