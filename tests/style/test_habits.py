# SPDX-License-Identifier: Apache-2.0
"""Habits of the code: one thing for each name, tests of behaviour, a licence and a docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

import pytest

from tests import REPOSITORY
from tests.source_tree import MODULES, PACKAGE, nodes_of, parse

pytestmark = pytest.mark.style


def types_of(module: str) -> Iterator[str]:
    """Yield the public classes and the aliases of types that a module defines at its top."""
    for node in parse(module).body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not is_type_variable(value):
                if name != name.upper() or len(name) == 1:
                    yield name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                yield name


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")


def test_a_type_name_stands_for_one_thing() -> None:
    """Who greps a name finds one definition."""
    defined: dict[str, list[str]] = {}
    for module in MODULES:
        for name in types_of(module):
            if name[0].isupper():
                defined.setdefault(name, []).append(module)
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}


PRIVATE_ACCESSES = 62
"""Bound of the accesses to private names in tests; lower it when there are fewer."""
DOCUMENTED = {"_asdict", "_exit", "_replace"}
"""Public methods of every NamedTuple, and `os._exit`."""


def private_accesses(text: str, own: Collection[str]) -> list[str]:
    """Return each access to one of the private names `own`, except on the object itself."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in own
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        if ast.unparse(node.value) != "super()"
    ]


def private_names() -> set[str]:
    """Return the private names that this package defines, at the top of a module or on an object."""
    defined: set[str] = set()
    for module in MODULES:
        for node in nodes_of(module):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    defined.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    defined.add(name)
    return {name for name in defined if re.match(r"_[^_]", name)} - DOCUMENTED


def test_tests_leave_private_names_alone() -> None:
    """A test of behaviour survives a change of the implementation."""
    own = private_names()
    # Parsing every test takes seconds, so parse only files that name one of them.
    named = re.compile(rf"\.(?:{'|'.join(sorted(own))})\b")
    found = {
        str(path.relative_to(REPOSITORY)): count
        for path in sorted((REPOSITORY / "tests").rglob("*.py"))
        if named.search(text := path.read_text(encoding="utf-8"))
        if (count := len(private_accesses(text, own)))
    }
    assert sum(found.values()) <= PRIVATE_ACCESSES, dict(sorted(found.items(), key=lambda one: -one[1]))


def test_an_access_to_a_private_name_would_be_found() -> None:
    text = "self._a; cls._a; super()._a; made._a; made._other; made.a._a.b"
    assert private_accesses(text, {"_a"}) == ["made._a", "made.a._a"]


def handlers_that_miss(text: str) -> list[int]:
    """Return the lines of handlers of TimeoutError around `asyncio.wait_for`."""
    return [
        handler.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Try) and any("asyncio.wait_for(" in ast.unparse(one) for one in node.body)
        for handler in node.handlers
        if handler.type is not None
        and "TimeoutError" in (names := re.findall(r"[\w.]+", ast.unparse(handler.type)))
        and "asyncio.TimeoutError" not in names
    ]


def test_a_wait_that_is_over_is_caught_in_python_3_10() -> None:
    """There, `asyncio.wait_for` raises another class."""
    found = {module: handlers_that_miss((PACKAGE / module).read_text("utf-8")) for module in MODULES}
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("caught", "lines"),
    [("TimeoutError", [3]), ("asyncio.TimeoutError", []), ("(TimeoutError, asyncio.TimeoutError)", [])],
)
def test_a_handler_that_misses_it_would_be_found(caught: str, lines: list[int]) -> None:
    text = f"try:\n    await asyncio.wait_for(x, 1)\nexcept {caught}:\n    pass"
    assert handlers_that_miss(text) == lines


LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"


def test_every_module_says_its_licence_and_its_purpose() -> None:
    texts = {module: (PACKAGE / module).read_text(encoding="utf-8") for module in MODULES}
    assert [module for module, text in texts.items() if not text.startswith(LICENCE)] == []
    assert [module for module in MODULES if not ast.get_docstring(parse(module))] == []
