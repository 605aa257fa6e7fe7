# SPDX-License-Identifier: Apache-2.0
"""What travels on the edges: versions of the oldest part, and copies instead of changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from recipe.async_pipeline.core.groups.items import Group, LoadReport, Prompt, StepBatch, Trajectory


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
