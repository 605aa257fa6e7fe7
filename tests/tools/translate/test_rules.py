# SPDX-License-Identifier: Apache-2.0
"""Every key of a file becomes something, or is named as unknown."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.config.foreign_keys import differs, nothing, to
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.translate import rllm, roll, uni_agent
from recipe.async_pipeline.tools.translate.rules import (
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


@pytest.mark.parametrize("system", [rllm, roll, uni_agent], ids=lambda system: system.__name__)
def test_every_key_is_found_by_a_search_of_the_sources(system: ModuleType) -> None:
    folder = Path(system.__file__ or "").parent
    source = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py")))
    assert [key for key, _ in system.TABLE if f'"{key}"' not in source] == []


def test_two_keys_that_disagree_are_refused() -> None:
    table = [("a", to("x")), ("b", to("x"))]
    assert translate({"a": 1, "b": 1}, table).overrides == {"x": 1}
    with pytest.raises(ConfigError, match="b asks for x=2 but a for 1; keep one of them"):
        translate({"a": 1, "b": 2}, table)


def test_empty_sections_and_lists_are_values() -> None:
    assert dict(leaves({"a": {}, "b": [1, 2], "c": {"d": None}})) == {"a": {}, "b": [1, 2], "c.d": None}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("list(range(0,4))", (1, 4)),
        ("list(range( 16, 24 ))", (1, 8)),
        ("list(range(0,16))", (2, 8)),
        ([0, 1], (1, 2)),
    ],
)
def test_devices(value: Any, found: tuple[int, int]) -> None:
    assert devices(value, "p") == found


@pytest.mark.parametrize("value", ["list(range(4,4))", "all", None, [], "list(range(0,12))"])
def test_devices_that_are_none_or_fill_no_nodes(value: Any) -> None:
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
