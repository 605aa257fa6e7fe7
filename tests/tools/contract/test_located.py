# SPDX-License-Identifier: Apache-2.0
"""Calls, assignments and replacements of an engine's members are found by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.tools.contract.declared import Alternative
from recipe.async_pipeline.tools.contract.located import Located, MemberUse
from recipe.async_pipeline.tools.contract.signatures import Signature, from_text
from recipe.async_pipeline.tools.contract.sources import OURS, Sources

USER = """
from vllm.core import helper

class Engine:
    def __init__(self, manager):
        self._send, self._more = manager.send, manager.more
        manager.send = self._send_one
        manager.paused = True

    def _send_one(self, item):
        return self._send(item)

def use(manager):
    manager.stop(1, now=True)
    helper(1)
    load, combine = manager.load, manager.combine
    load(2, text="")
"""


@pytest.fixture
def located(tmp_path: Path) -> Located:
    for path, text in {
        "vllm/__init__.py": "",
        "vllm/core.py": "def helper(a): ...\n",
        "pkg/use.py": USER,
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return Located(
        Sources(
            roots={"vllm": tmp_path / "vllm", OURS: tmp_path / "pkg"},
            theirs="vllm",
            files=("use.py",),
        )
    )


def uses_of(located: Located, place: str) -> list[MemberUse]:
    return list(located.of(Alternative(place), ["use.py"]))


def test_a_call_is_found_also_under_the_name_that_keeps_it(located: Located) -> None:
    (stop,) = uses_of(located, "vllm.core:Manager.stop")
    assert (stop.where, stop.how) == ("use.py:14", "calls")
    sends = {(use.how, use.where) for use in uses_of(located, "vllm.core:Manager.send")}
    assert sends == {("calls", "use.py:11"), ("stores", "use.py:7"), ("replaces", "use.py:10")}


def test_a_call_is_found_also_under_the_variable_that_keeps_it(located: Located) -> None:
    (load,) = uses_of(located, "vllm.core:Manager.load")
    assert (load.where, load.how) == ("use.py:17", "calls")
    assert "text" in str(load.conflict(_signature("def (self, a, words=...)"), ""))
    assert load.conflict(_signature("def (self, a, text=...)"), "") is None


def _signature(text: str) -> Signature:
    found = from_text(text)
    assert found is not None
    return found


VERSIONED = """
from typing import Protocol
from .more import Versioned, current
from recipe.async_pipeline.weight_sync import Other

class AsyncEngine(Protocol):
    async def stop(self) -> None: ...

class Own: ...

def use(engine, versioned):
    versioned, made, other = Versioned[int](engine), Versioned(engine), Other()
    own, running = Own(), current()
    made.stop(1), other.stop(1), own.stop(1)
    versioned.stop(2), running.stop(3)
"""


def test_a_protocol_and_an_object_of_this_package_are_no_use_of_an_engine(
    located: Located, tmp_path: Path
) -> None:
    (tmp_path / "pkg/use.py").write_text(VERSIONED, encoding="utf-8")
    found = uses_of(located, "vllm.core:Manager.stop")
    assert [(use.how, use.where) for use in found] == [("calls", "use.py:15"), ("calls", "use.py:15")], (
        "only what a parameter or a function may give"
    )


def test_an_imported_function_is_found(located: Located) -> None:
    (call,) = uses_of(located, "vllm.core:helper")
    assert (call.where, call.how) == ("use.py:15", "calls")


@pytest.mark.parametrize(
    ("member", "shape", "words"),
    [
        ("stop", "def (self, number, now=...)", None),
        ("stop", "staticmethod def (number, now=...)", None),
        ("stop", "classmethod def (cls, number, now=...)", None),
        ("stop", "def (self, number)", "passes now"),
        ("stop", "def (self, number, now, more)", "does not pass more"),
        ("send", "def (self, item)", None),
        ("send", "def (self, item, more)", "does not pass more"),
    ],
)
def test_a_call_fits_a_signature_or_does_not(
    located: Located, member: str, shape: str, words: str | None
) -> None:
    signature = from_text(shape)
    assert signature is not None
    calls = [use for use in uses_of(located, f"vllm.core:Manager.{member}") if use.how == "calls"]
    (why,) = [use.conflict(signature, shape) for use in calls]
    assert (why is None) if words is None else (why is not None and words in why)


def test_a_replacement_must_take_every_call_of_the_engine(located: Located) -> None:
    (use,) = [use for use in uses_of(located, "vllm.core:Manager.send") if use.how == "replaces"]
    more = from_text("def (self, item, more)")
    assert more is not None
    assert use.conflict(more, "def (self, item, more)") == (
        "the engine passes 3 arguments by position, 2 are taken"
    )


def test_a_constructor_is_not_found_by_its_name(located: Located) -> None:
    assert uses_of(located, "vllm.core:Manager.__init__") == []
