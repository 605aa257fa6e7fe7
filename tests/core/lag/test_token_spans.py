# SPDX-License-Identifier: Apache-2.0
"""All readers of spans agree, token by token, on which version wrote which token."""

from __future__ import annotations

import gc
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.groups.items import Trajectory
from recipe.async_pipeline.core.lag.token_ages import masked, oldest_trained, written
from recipe.async_pipeline.core.lag.token_spans import pairs_of, plain, spans_of
from recipe.async_pipeline.observe.samples.token_versions import versions_written

TOKENS = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=30)
"""The version of each token of a response, and whether the policy generated it, or a tool."""


@given(st.lists(TOKENS, max_size=5), st.integers(0, 11))
def test_every_token_has_the_version_that_wrote_it(
    responses: list[list[tuple[int, bool]]], before: int
) -> None:
    trajectories = []
    for tokens in responses:
        versions = [version for version, _ in tokens]
        # A span begins with each version, and with each turn.
        changed = [a[0] != b[0] or (b[1] and not a[1]) for a, b in pairwise(tokens)]
        pairs = [[versions[i], i] for i, begins in enumerate([True, *changed]) if begins]
        spans = spans_of([float(version), start] for version, start in pairs)  # type: ignore[list-item]
        assert pairs_of(spans) == pairs and {type(one) for span in spans for one in span} == {int}
        one = Trajectory(
            key="",
            first_version=min(versions),
            last_version=max(versions),
            num_tokens=len(versions),
            spans=spans,
            masked_before=before,
        )
        trajectories.append(one)
        assert [w.version for w in written(one) for _ in range(w.start, w.end)] == versions
        left_out = {place for start, end in masked(one) for place in range(start, end)}
        assert left_out == {i for i, version in enumerate(versions) if version < before}
        assert oldest_trained(one) == min((v for v in versions if v >= before), default=None)

    generated = [[version for version, own in tokens if own] for tokens in responses]
    lengths = np.array([len(tokens) for tokens in responses], dtype=np.int64)
    own = np.array([own for tokens in responses for _, own in tokens], dtype=bool)
    found = versions_written(trajectories, lengths, own)
    assert list(np.repeat(found.versions, found.tokens)) == [v for row in generated for v in row]
    assert found.row_tokens.tolist() == [len(row) for row in generated]
    assert found.changes().tolist() == [sum(a != b for a, b in pairwise(row)) for row in generated]
    assert found.known.all()


def test_what_is_kept_of_responses_is_left_out_by_the_garbage_collector() -> None:
    """A run has tens of thousands of them, and a collection that visits them all blocks the event loop."""
    found = plain([[1, 0], (2, 5)])
    assert found == tuple(spans_of([[1, 0], [2, 5]])) and pairs_of(found) == [[1, 0], [2, 5]]
    gc.collect()  # the pairs
    gc.collect()  # what holds them
    assert not gc.is_tracked(found)
    assert gc.is_tracked(spans_of([[1, 0]])[0])
