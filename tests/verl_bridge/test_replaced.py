# SPDX-License-Identifier: Apache-2.0
"""The table of replacements is complete, leads to what it names, and is applied once."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge import replaced
from recipe.async_pipeline.verl_bridge.replaced import REPLACED, Replacement
from tests import REPOSITORY
from tests.conftest import Load
from tests.derived_docs import counts
from tests.source_tree import MODULES, PACKAGE, parse

STACK = {"verl", "ray", "transfer_queue", "vllm", "sglang", "omegaconf"}
ROWS = [row for rows in REPLACED.values() for row in rows]


# The table.


def test_each_row_says_what_why_and_until_when() -> None:
    incomplete = [row for row in ROWS if not row.why or not row.remove_when]
    assert incomplete == []
    assert {row.module.split(".")[0] for row in ROWS} <= STACK
    places = [(row.module, row.name) for row in ROWS]
    assert len(places) == len(set(places)), "a name has one replacement"


def test_the_readme_counts_patches_and_replacements() -> None:
    readme = " ".join((REPOSITORY / "README.md").read_text("utf-8").split())
    assert all(f"{number} {words}" in readme for words, number in counts().items()), "run fix.sh"


def test_each_replacement_exists() -> None:
    wrong = []
    for row in ROWS:
        module, colon, name = row.by.partition(":")
        if colon:
            if name not in {*defined(parse(f"verl_bridge/{module.replace('.', '/')}.py"))}:
                wrong.append(row.by)
    assert wrong == []


def defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_each_part_is_applied_somewhere() -> None:
    sources = [path.read_text("utf-8") for path in (PACKAGE / "verl_bridge").rglob("*.py")]
    calls = [f'{call}("{part}"' for part in REPLACED for call in ("apply", "apply_on_import", "applied")]
    applied = {call.split('"')[1] for call in calls if any(f"replaced.{call}" in text for text in sources)}
    assert applied == REPLACED.keys()


@pytest.mark.real_engine
def test_verls_trainer_finds_our_classes_and_functions(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_base = load("verl.trainer.ppo.v1.trainer_base")
    for row in REPLACED["trainer"]:
        monkeypatch.setattr(trainer_base, row.name, getattr(trainer_base, row.name))
    replaced.apply("trainer")
    for row in REPLACED["trainer"]:
        module, _, name = row.by.partition(":")
        ours = getattr(load(f"recipe.async_pipeline.verl_bridge.{module}"), name)
        assert getattr(trainer_base, row.name) is ours


# How it is applied.


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of another package, whose names the part `test` replaces."""

    class Stock:
        def size(self) -> int:
            return 1

    module = ModuleType("foreign_package")
    module.Stock, module.limit = Stock, 8  # type: ignore[attr-defined]
    rows = (
        Replacement("foreign_package", "Stock.size", "grow", "why", "when", wraps=True),
        Replacement("foreign_package", "limit", "limit", "why", "when"),
        Replacement("foreign_package", "added", "limit", "why", "when"),
    )
    monkeypatch.setitem(REPLACED, "test", rows)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "foreign_package", module)
    for kept in ("_stock", "_ours", "_awaited"):
        monkeypatch.setattr(replaced, kept, type(getattr(replaced, kept))())
    return module


def by(number: int) -> Any:
    return lambda stock: lambda self: stock(self) + number


def test_a_second_call_replaces_the_first(foreign: Any) -> None:
    replaced.apply("test", grow=by(1), limit=2)
    assert (foreign.Stock().size(), foreign.limit, foreign.added) == (2, 2, 2)
    replaced.apply("test", grow=by(3), limit=4)
    assert (foreign.Stock().size(), foreign.limit, foreign.added) == (4, 4, 4), "the stock is wrapped once"


def test_a_name_that_something_else_has_replaced_meanwhile_is_wrapped_as_it_is(foreign: Any) -> None:
    replaced.apply("test", grow=by(1), limit=2)
    foreign.Stock.size = lambda self: 10
    replaced.apply("test", grow=by(1), limit=2)
    assert foreign.Stock().size() == 11


def test_afterwards_the_stock_is_back(foreign: Any) -> None:
    with replaced.applied("test", grow=by(1), limit=2):
        assert (foreign.Stock().size(), foreign.limit) == (2, 2)
    assert (foreign.Stock().size(), foreign.limit) == (1, 8)
    with replaced.applied("test", grow=by(1), limit=2):
        assert foreign.Stock().size() == 2


# No replacement outside the table.

ELSEWHERE = {
    "verl_bridge/rollout/sglang/cpu_stubs.py": "torch, in SGLang's processes on a CPU",
    "verl_bridge/workers/megatron/cuda_shim.py": "torch and Megatron without CUDA, on the CPU platform",
    "verl_bridge/workers/megatron/standin.py": "faults of Megatron, each checked whether it is still there",
}
"""Modules that replace names of other packages, none of them of STACK."""
MEASURES = "lab/bench/jobs/"
"""Puts its probes into verl's trainers and engines."""


def replacements(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and package of each assignment to a member of a foreign module or class."""
    foreign = dict(imported_names(tree))
    for node in ast.walk(tree):
        match node:
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=items)):
                packages = (package_of(item, foreign) for item in items)
                foreign.update((name, package) for package in packages if package)
    for node in ast.walk(tree):
        for target in assigned_to(node):
            if package := package_of(target, foreign):
                yield getattr(node, "lineno", 0), package


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, node.module.split(".")[0]


def assigned_to(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the objects of which an attribute is set: `x` in `x.y = 1`, `setattr(x, …)`, `vars(x)[…] = 1`."""
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    for target in targets:
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            match one:
                case ast.Attribute(value=value):
                    yield value
                case ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[value])):
                    yield value
                case ast.Subscript(value=ast.Attribute(value=value, attr="__dict__")):
                    yield value
    match node:
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[value, *_]):
            yield value


def package_of(node: ast.expr, foreign: dict[str, str]) -> str | None:
    """Return the foreign package of an imported module, class or a member of them, or None."""
    match node:
        case ast.Call(func=ast.Attribute(attr="import_module")):
            return "a module by its name"
        case ast.Attribute(value=value):
            return package_of(value, foreign)
        case ast.Name(id=name):
            package = foreign.get(name)
            return None if package in {None, "recipe", *sys.stdlib_module_names} else package
    return None


def test_names_of_other_packages_are_replaced_here_only() -> None:
    found: dict[str, set[str]] = {}
    for module in MODULES:
        packages = {package for _, package in replacements(parse(module))}
        if packages and not module.startswith(MEASURES):
            found[module] = packages
    assert {module: found[module] & STACK for module in found if found[module] & STACK} == {}, "add a row"
    assert found.keys() == ELSEWHERE.keys()


@pytest.mark.parametrize(
    "code",
    [
        "import verl.a\nverl.a.b = 1",
        "from verl import a\na.b, c = 1, 2",
        "from verl.a import B\nsetattr(B, 'c', 1)",
        "from verl import a\nvars(a)['b'] = 1",
        "from verl import a, b\nfor one in (a, b):\n    one.c = 1",
        "def f():\n    from verl import a\n    del a.b",
    ],
)
def test_another_replacement_would_be_found(code: str) -> None:
    assert [package for _, package in replacements(ast.parse(code))] == ["verl"]


def test_objects_of_this_package_are_no_replacement() -> None:
    code = "from .a import b\nfrom recipe import c\nb.x = c.x = 1\nself.verl = 2\nverl = 3"
    assert [*replacements(ast.parse(code))] == []
