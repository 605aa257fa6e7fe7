# SPDX-License-Identifier: Apache-2.0
"""Every key of a file becomes something, or is named as unknown."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.config.keys.foreign_keys import Document, Outcome, Takes, differs, nothing, to
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.translate import async_flow, rllm, roll, uni_agent
from recipe.async_pipeline.tools.translate.rules import (
    TranslatedFile,
    as_it_is,
    devices,
    leaves,
    quotient,
    translate,
    whole,
)


def test_each_key_gets_the_first_rule_that_matches() -> None:
    table = [
        ("a.exact", to("x.y", as_=lambda value: value + 1, text="one more")),
        ("a.*", nothing("so it is")),
        ("b", differs("nearly", **{"z": 3})),
        ("async_training.c", as_it_is),
        ("d", as_it_is),
    ]
    document = {"a": {"exact": 1, "other": {"deep": 2}}, "b": 5, "async_training": {"c": 6}, "d": 7, "e": 8}
    found = translate(document, table, also={"+on": True})
    assert found.overrides == {"+on": True, "x.y": 2, "z": 3, "+async_training.c": 6, "d": 7}
    assert [(one.key, one.outcome.kind) for one in found.keys] == [
        ("a.exact", "set"),
        ("a.other.deep", "nothing to do"),
        ("b", "differs"),
        ("async_training.c", "set"),
        ("d", "set"),
        ("e", "unknown"),
    ]
    assert found.unknown == ["e"]


@pytest.mark.parametrize("system", [async_flow, rllm, roll, uni_agent], ids=lambda system: system.__name__)
def test_every_key_is_found_by_a_search_of_the_sources(system: ModuleType) -> None:
    folder = Path(system.__file__ or "").parent
    source = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py")))
    assert [key for key, _ in system.TABLE if f'"{key}"' not in source] == []


def outcomes(found: TranslatedFile) -> dict[str, tuple[str, str]]:
    return {one.key: (one.outcome.kind, one.outcome.text) for one in found.keys}


def test_a_key_that_disagrees_with_another_is_named_and_the_rest_is_translated() -> None:
    table = [("a", to("x")), ("b", to("x")), ("c", to("y"))]
    assert translate({"a": 1, "b": 1}, table).overrides == {"x": 1}
    found = translate({"a": 1, "b": 2, "c": 3}, table)
    assert found.overrides == {"x": 1, "y": 3} and found.unsupported == ["b"]
    assert outcomes(found)["b"] == ("unsupported", "b asks for x=2 but a for 1; keep one of them")


def test_a_wrong_value_is_named_and_the_rest_is_translated() -> None:
    def odd(value: Any, document: Document) -> Outcome:
        raise ConfigError(f"a must be odd, got {value}")

    even = Takes(lambda value: value % 2 == 0, "even", "add 1")
    found = translate({"a": 2, "b": 3, "c": 4}, [("a", odd), ("b", to("y", takes=even)), ("c", to("z"))])
    assert found.unsupported == ["a", "b"] and found.overrides == {"z": 4}
    assert outcomes(found)["a"][1] == "a must be odd, got 2"
    assert outcomes(found)["b"][1] == "must be even, got 3; add 1"


def test_a_value_of_another_type_is_named() -> None:
    found = translate({"a": "much", "b": [1]}, [("a", to("x", as_=float)), ("b", to("y", as_=float))])
    assert found.unsupported == ["a", "b"] and "a has another type, got 'much'" in outcomes(found)["a"][1]


def test_a_variable_of_the_file_is_no_unknown_key() -> None:
    document = {"size": 3, "choices": {"first": {"n": 1}, "second": {"n": 2}}, "warp": 4, "run": {"typo": 5}}
    found = translate(document, [("run.steps", to("x"))], variables={"size", "choices.first", "run.typo"})
    assert found.unknown == ["warp", "run.typo"]
    assert outcomes(found)["choices.second.n"][0] == "nothing to do"


def test_sections_that_are_left_out_have_one_outcome() -> None:
    off = Outcome("nothing to do", text="not in use")
    found = translate({"a": {"b": {"c": 1}, "bc": 2}}, [("a.bc", to("x"))], left_out={"a.b": off})
    assert outcomes(found)["a.b.c"] == ("nothing to do", "not in use") and found.overrides == {"x": 2}


def test_a_value_that_the_file_leaves_open_is_missing() -> None:
    found = translate({"a": "???"}, [("a", to("x"))])
    assert found.overrides == {} and found.missing == ("a: the file leaves it open",)
    assert outcomes(found)["a"][0] == "by hand"


def test_empty_sections_and_lists_are_values() -> None:
    assert dict(leaves({"a": {}, "b": [1, 2], "c": {"d": None}})) == {"a": {}, "b": [1, 2], "c.d": None}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("list(range(0,4))", (1, 4)),
        ("list(range( 16, 24 ))", (1, 8)),
        ("list(range(0,16))", (2, 8)),
        ("list(range(0,12))", (3, 4)),
        ("list(range(0,4)) + list(range(8,12))", (1, 8)),
        ("list([0,1,8,9])", (1, 4)),
        ("[0, 1, 1]", (1, 2)),
        ([0, 1], (1, 2)),
    ],
)
def test_devices(value: Any, found: tuple[int, int]) -> None:
    assert devices(value, "p") == found


def test_nodes_have_as_many_devices_as_the_file_says() -> None:
    assert devices("list(range(0,16))", "p", 4) == (4, 4)


@pytest.mark.parametrize(
    "value", ["list(range(4,4))", "all", None, [], "list('ab')", "exit(1)", "list(range(0.5))", [True], "["]
)
def test_devices_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="^p must "):
        devices(value, "p")


def test_numbers_are_checked() -> None:
    document = {"a": {"b": 12}, "c": 0, "d": True, "e": "x"}
    assert whole(document, "a.b") == 12 and whole(document, "z", 3) == 3
    assert quotient(document, "a.b", 4, "n") == 3
    for path in ("c", "d", "e", "z"):
        with pytest.raises(ConfigError, match=f"{path} must be a whole number >= 1"):
            whole(document, path)
    with pytest.raises(ConfigError, match="a.b must be a multiple of n, 5, got 12"):
        quotient(document, "a.b", 5, "n")
