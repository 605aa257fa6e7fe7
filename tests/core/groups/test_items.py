# SPDX-License-Identifier: Apache-2.0
"""What travels on the edges: versions of the oldest part, and copies instead of changes."""

from __future__ import annotations

import dataclasses
import gc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.groups.items import (
    Group,
    LoadReport,
    Prompt,
    StepBatch,
    Trajectory,
    episode_of,
    last_keys,
    pairs_of,
    plain,
    spans_of,
)
from recipe.async_pipeline.core.lag.token_ages import masked, oldest_trained, written
from recipe.async_pipeline.observe.samples.token_versions import versions_written


def group(uid: str, *first_versions: int) -> Group:
    return Group(
        uid=uid,
        step=3,
        trajectories=tuple(
            Trajectory(key=f"{uid}_{i}", first_version=v, last_version=v + 1, num_tokens=1)
            for i, v in enumerate(first_versions)
        ),
    )


def test_the_oldest_trajectory_dates_its_group_and_its_batch() -> None:
    groups = (group("a", 5, 2), group("b", 4, 3, 6))
    assert [g.first_version for g in groups] == [2, 3]
    batch = StepBatch(step=3, groups=groups)
    assert batch.first_version == 2
    assert batch.num_trajectories == 5


def test_merged_keeps_the_payload_and_adds_what_the_siblings_found() -> None:
    first = StepBatch(step=3, groups=(), payload="p", metrics={"a": 1}, timing_s={"x": 1.0})
    second = StepBatch(step=3, groups=(), payload="other", metrics={"b": 2}, timing_s={"y": 2.0})
    merged = first.merged(second, StepBatch(step=3, groups=(), metrics={"c": 3}))
    assert merged.payload == "p"
    assert dict(merged.metrics) == {"a": 1, "b": 2, "c": 3}
    assert dict(merged.timing_s) == {"x": 1.0, "y": 2.0}
    assert dict(first.metrics) == {"a": 1}, "a batch may be on two edges at once, so it never changes"
    assert first.merged() == first


def test_with_results_replaces_only_what_it_is_given() -> None:
    batch = StepBatch(step=3, groups=(), payload="p", metrics={"a": 1})
    found = batch.with_results(metrics={"a": 2, "b": 3}, old_log_prob=0.5)
    assert (found.payload, dict(found.metrics), dict(found.timing_s)) == (
        "p",
        {"a": 2, "b": 3},
        {"old_log_prob": 0.5},
    )
    assert batch.with_results(payload="q").payload == "q"
    assert (batch.payload, dict(batch.metrics), dict(batch.timing_s)) == ("p", {"a": 1}, {})


def test_items_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Prompt(uid="a", step=1).step = 2  # type: ignore[misc]


def test_every_figure_of_a_load_is_added_up() -> None:
    names = [field.name for field in dataclasses.fields(LoadReport) if field.name != "unexplained"]

    def report(factor: int) -> LoadReport:
        figures: dict[str, Any] = {name: factor * number for number, name in enumerate(names, 1)}
        return LoadReport(**figures)

    assert LoadReport.total([report(1), report(10)]) == report(11)
    assert LoadReport.total([]) == LoadReport()


def test_the_first_unexplained_tensors_are_kept() -> None:
    some = LoadReport(elements_served=8, elements_explained=6, unexplained="head.weight")
    total = LoadReport.total([LoadReport(elements_served=8, elements_explained=8), some])
    assert (total.unexplained, total.explained_share) == ("head.weight", 0.875)
    assert LoadReport().explained_share is None


def test_the_last_key_of_each_session() -> None:
    keys = ["u_0_0", "u_0_1", "u_0_2", "u_1_0", "u_10_0", "u_2_9", "u_2_10", "v_0_0", "a", "a_b"]
    assert last_keys(keys) == {"u_0_2", "u_1_0", "u_10_0", "u_2_10", "v_0_0", "a", "a_b"}
    assert last_keys([]) == set()


def test_the_keys_of_an_episode_have_its_name() -> None:
    keys = ["u_0_0", "u_0_10", "u_10_0", "v_w_1_0", "a", "a_b"]
    assert [episode_of(key) for key in keys] == ["u_0", "u_0", "u_10", "v_w_1", "a", "a_b"]


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
