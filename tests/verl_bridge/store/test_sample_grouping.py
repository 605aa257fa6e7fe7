# SPDX-License-Identifier: Apache-2.0
"""Trajectories are grouped so that verl joins them without loss."""

from __future__ import annotations

import pytest
import torch

from recipe.async_pipeline.verl_bridge.store.sample_columns import joinable

pytestmark = pytest.mark.real_engine


def test_responses_of_any_length_join() -> None:
    lengths = (3, 5, 3)
    assert joinable([{"responses": torch.zeros(n), "uid": "u"} for n in lengths]) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": 1}, id="a field more"),
        pytest.param({"a": torch.zeros(2)}, {"a": None}, id="no tensor"),
        pytest.param({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.long)}, id="another dtype"),
        pytest.param({"a": torch.zeros(4, 2)}, {"a": torch.zeros(4, 3)}, id="longer in a later dimension"),
    ],
)
def test_trajectories_that_would_lose_data_do_not_join(
    one: dict[str, object], other: dict[str, object]
) -> None:
    assert joinable([one, other, one]) == [[0, 2], [1]]


def test_order_of_fields_does_not_matter() -> None:
    assert joinable([{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == [[0, 1]]


def test_no_trajectories_give_no_groups() -> None:
    assert joinable([]) == []
