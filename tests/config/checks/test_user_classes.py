# SPDX-License-Identifier: Apache-2.0
"""A custom class is found in its source, without an import; errors have one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.config.checks.user_classes import check_function, find_class, schedule_at
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.strategies import FullyAsync

SCHEDULES = """
from recipe.async_pipeline.strategies import FullyAsync
class Mine(FullyAsync): ...
class Other(dict): ...
"""
SOURCE = """
import sys
sys.exit("this module must not be imported")
from elsewhere import Imported

class Plain(Imported):
    order = "finished"

class Rootless: ...
NUMBER = 3

try:
    class Inner(Plain):
        order: str = "drawn"
except ImportError:
    Other = None

Alias = Plain
Silent = type("Silent", (), {})

def function(): ...
async def pair(task, policy, more=None, *, log=None): ...
def strict(task, policy, *, log): ...
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_find.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "mine_to_load.py").write_text(SCHEDULES, encoding="utf-8")
    (tmp_path / "broken_to_load.py").write_text("class Mine(list): ...\n1 / 0", encoding="utf-8")
    (tmp_path / "torn_to_find.py").write_text("class Plain(:\n", encoding="utf-8")
    (tmp_path / "open_to_find.py").write_text("def __getattr__(name): ...\n", encoding="utf-8")
    (tmp_path / "package_to_seek").mkdir()
    for name in ("__init__.py", "inner.py"):
        (tmp_path / "package_to_seek" / name).write_text("", encoding="utf-8")
    (tmp_path / "package_to_find").mkdir()
    (tmp_path / "package_to_find" / "__init__.py").write_text("1 / 0", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["Plain", "Inner"])
def test_a_class_is_found(name: str) -> None:
    cls = find_class(f"mine_to_find:{name}", "p")
    assert cls is not None
    assert cls.name == name


@pytest.mark.parametrize(
    "target",
    [
        "mine_to_find:Imported",
        "mine_to_find:Alias",
        "mine_to_find:Silent",
        "mine_to_find:Other",
        "open_to_find:Any",
        "builtins:dict",
    ],
)
def test_a_class_that_the_source_cannot_show_is_accepted(target: str) -> None:
    assert find_class(target, "p") is None


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("mine_to_find:Plian", "which the module does not define (did you mean 'Plain'?)"),
        ("mine_to_find:Rootless", "which has no base class"),
        ("mine_to_find:NUMBER", "which the module does not define"),
        ("mine_to_find:function", "which is a function; name a class"),
        ("mine_to_find:", "must read module:Class"),
        (":Plain", "must read module:Class"),
        ("mine to find:Plain", "must read module:Class"),
        ("none_to_find:Plain", "which cannot be found"),
        ("torn_to_find:Plain", "which is not valid Python (invalid syntax"),
        ("package_to_find.inner:Plain", "cannot be imported (ZeroDivisionError: division by zero)"),
        ("json:dumps", "which is a function"),
    ],
)
def test_errors_have_one_line(target: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_class(target, "the.key")
    line = str(caught.value)
    assert line.startswith("the.key ")
    assert words in line
    assert repr(target) in line
    assert "\n" not in line


def test_a_strategy_is_loaded() -> None:
    assert schedule_at("fully_async", "p") is FullyAsync
    assert issubclass(schedule_at("mine_to_load:Mine", "p"), FullyAsync)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("mine_to_load:Other", "the.key: strategy mine_to_load:Other must subclass"),
        ("os:path", "the.key: strategy os:path must be a class, got module; name a class"),
        ("mine_to_load:Mien", "which the module does not define (did you mean 'Mine'?)"),
        ("broken_to_load:Mine", "cannot be imported (ZeroDivisionError: division by zero); correct it"),
    ],
)
def test_what_is_no_strategy_is_one_line(target: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_at(target, "the.key")
    assert str(caught.value).startswith("the.key")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target", ["mine_to_find:Alias", "mine_to_find:Imported", "open_to_find:any", "mine_to_find:pair"]
)
def test_functions_that_take_two_arguments_or_may(target: str) -> None:
    check_function(target, "p", 2)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("mine_to_find:functoin", "which the module does not define (did you mean 'function'?)"),
        ("mine_to_find:Plain", "which is a class; name a function"),
        (
            "mine_to_find:function",
            "called with 2 arguments, got 'mine_to_find:function', whose arguments are ()",
        ),
        ("mine_to_find:strict", "whose arguments are (task, policy, *, log)"),
        ("mine_to_fnid:pair", "cannot be found, got 'mine_to_fnid:pair' (did you mean 'mine_to_find'?)"),
        ("package_to_seek.innr:f", "(did you mean 'package_to_seek.inner'?); check PYTHONPATH"),
    ],
)
def test_functions_that_do_not_fit(target: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_function(target, "the.key", 2)
    assert str(caught.value).startswith("the.key ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_that_needs_no_base_class() -> None:
    found = find_class("tests.fakes.environments:Counting", "environment", derived=False)
    assert found is not None and found.name == "Counting"
    with pytest.raises(ConfigError, match="has no base class"):
        find_class("tests.fakes.environments:Counting", "custom_stages")
