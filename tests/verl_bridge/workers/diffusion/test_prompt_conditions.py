# SPDX-License-Identifier: Apache-2.0
"""Conditions are fetched once a prompt, whatever micro-batches its images are in."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.real_engine
NAMES = ("states", "pooled")


class Store:
    """Returns the conditions of each key, as nested columns."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        assert partition_id == "train" and select_fields == ["condition_states", "condition_pooled"]
        self.asked.append(keys)
        values = {"condition_states": (2, 3), "condition_pooled": (4,)}
        return {
            name: torch.nested.as_nested_tensor(
                [torch.full(shape, float(key)) for key in keys], layout=torch.jagged
            )
            for name, shape in values.items()
        }


@pytest.fixture
def store(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(module, "tq", made)
    return made


def test_each_row_gets_the_conditions_of_its_holder(module: ModuleType, store: Store) -> None:
    found = module.PromptConditions(NAMES).of(["2", "1", "2"])
    assert found["pooled"].tolist() == [[2.0] * 4, [1.0] * 4, [2.0] * 4]
    assert found["states"].shape == (3, 2, 3) and store.asked == [["1", "2"]]


def test_what_is_known_is_not_fetched_again(module: ModuleType, store: Store) -> None:
    conditions = module.PromptConditions(NAMES)
    for holders in (["1", "2"], ["2", "3"], ["3", "1"]):
        conditions.of(holders)
    assert store.asked == [["1", "2"], ["3"]]


def test_no_more_is_kept_than_may_be(
    module: ModuleType, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * (6 + 4) * 4)
    conditions = module.PromptConditions(NAMES)
    for holders in (["1", "2"], ["3"], ["2", "3"], ["1"]):
        conditions.of(holders)
    assert store.asked == [["1", "2"], ["3"], ["1"]]
    assert conditions.of(["1", "2", "3", "4"])["pooled"].shape == (4, 4), "a batch may be larger"
