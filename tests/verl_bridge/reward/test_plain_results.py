# SPDX-License-Identifier: Apache-2.0
"""Results of reward functions that processes without their modules can read."""

from __future__ import annotations

import enum
import pickle
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.verl_bridge.reward.plain_results import plain_result

FILE = """
import dataclasses, enum, typing

class Colour(enum.Enum):
    RED = 1

class Number:
    def __float__(self):
        return 0.5

class Facts(dict):
    pass

@dataclasses.dataclass
class Info:
    a: int

class Pair(typing.NamedTuple):
    a: int
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of a reward function's file, which no other process can import."""
    made = ModuleType("rewards_of_a_user")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(FILE, vars(made))  # noqa: S102
    return made


def test_objects_of_the_file_become_their_texts(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    info = module.Facts(a=[module.Colour.RED, 1], score=module.Number())
    given = {"score": 1.0, "colour": module.Colour.RED, "info": module.Info(1), "facts": info, "call": len}
    found = plain_result({**given, "pair": module.Pair(2), "kind": enum.Enum})
    monkeypatch.delitem(sys.modules, module.__name__)
    assert pickle.loads(pickle.dumps(found)) == found
    assert found["colour"] == "Colour.RED" and found["info"] == "Info(a=1)"
    assert found["facts"]["a"] == ["Colour.RED", 1] and "Number object" in found["facts"]["score"]
    assert found["call"] == "<built-in function len>" and found["pair"] == (2,)


def test_a_score_of_a_type_of_the_file_is_its_number(module: ModuleType) -> None:
    assert plain_result(module.Number()) == plain_result({"score": module.Number()})["score"] == 0.5
    assert plain_result([{"score": module.Number()}, 1]) == [{"score": 0.5}, 1]
    assert plain_result(module.Colour.RED) == "Colour.RED", "which is no score, and the error says so"


@pytest.mark.parametrize(
    "result",
    [
        1.0,
        None,
        np.float32(0.5),
        {"score": Decimal(1), "where": Path("a"), "seen": {1, 2}, "deep": {"a": [(1, "b")]}},
        {"score": True, "pred": "é", "b": b"x"},
    ],
)
def test_other_results_stay_as_they_are(result: Any) -> None:
    found = plain_result(result)
    assert found == result and type(found) is type(result)
    if isinstance(result, Mapping):
        assert all(found[name] is value for name, value in result.items())


def test_texts_that_no_file_can_hold_are_escaped() -> None:
    assert plain_result({"score": 0, "pred": ["é\ud800"]}) == {"score": 0, "pred": ["é\\ud800"]}


def test_arrays_of_objects_are_looked_into(module: ModuleType) -> None:
    numbers, objects = np.arange(3), np.array([module.Colour.RED, 1], dtype=object)
    found = plain_result({"score": 0, "numbers": numbers, "objects": objects})
    assert found["numbers"] is numbers and found["objects"].tolist() == ["Colour.RED", 1]
