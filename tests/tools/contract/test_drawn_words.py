# SPDX-License-Identifier: Apache-2.0
"""Words that this package uses of an engine are reported if the engine renames them.

The words are drawn from the files that use an engine, not from the contract or its tables. A word is

- a module or a name that a file imports from the engine;
- an attribute, a key, or a name in `getattr` that a file takes from what may be an engine's object, by the
  walk of `engine_objects.py`, and every attribute that neither this package, verl, Python nor torch defines,
  unless it is of something that is imported from elsewhere;
- a keyword in a call of such an object, of a class of the engine, or of a class of verl;
- a word in a constant of a module, or a key of what is passed on by `**`.

It counts if the installed engine defines it: as a function, a class, a field, an attribute that is assigned,
a parameter or a string. It is renamed in each file of the engine that defines it, where it is defined; what
only reads it stays. A module is hidden. The comparison must name the word.

Two kinds of words do not count: in a file that uses both engines, what only the contract with the other one
has; and what the code replaces by something else that the engine has, too.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import builtins
import concurrent.futures
import dataclasses
import gc
import importlib.util
import multiprocessing.process
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from recipe.async_pipeline.installed.engines import ENGINES, EngineTree, installed
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.contract import declared, engines
from recipe.async_pipeline.tools.contract.arguments import arguments_in
from recipe.async_pipeline.tools.contract.engines import EngineContract
from recipe.async_pipeline.tools.contract.sources import (
    Import,
    Module,
    Sources,
    guarded_imports,
    imported,
)
from tests.source_tree import MODULES, nodes_of

from .engine_objects import EngineObjects
from .test_declared import IN_AN_ENGINE, NOT_OF_AN_ENGINE, OF_OTHERS, OF_PYTHON_AND_TORCH

DRAWN, SEED = 40, 59
INSTALLED = {engine.name: engine for engine in installed()}
SHIPPED = engines.load(patches_dir())

_KNOWN = (
    *(value for value in vars(builtins).values() if isinstance(value, type)),
    *(torch, torch.Tensor, torch.nn, torch.nn.Module, torch.distributed, torch.distributed.ProcessGroup),
    *(argparse, argparse.ArgumentParser, asyncio, asyncio.Event, asyncio.Future, concurrent.futures.Future),
    multiprocessing.process.BaseProcess,
)
OF_KNOWN = OF_PYTHON_AND_TORCH.union(*map(dir, _KNOWN), {"remove_duplicate"})


class Word(NamedTuple):
    """A word that a file of this package uses."""

    file: str
    name: str


# Drawing.


def words_of(sources: Sources, file: str) -> set[Word]:
    """Return the words of a file that may be the engine's."""
    module = declared.module_of(sources, file)
    objects = EngineObjects(sources, module, file in IN_AN_ENGINE)
    found = {access.name for access in objects.accesses()} | objects.keywords
    found |= {*_attributes(module), *arguments_in(sources, module), *_keywords(module)}
    if file.startswith(("verl_bridge/rollout/", "verl_bridge/rules/")):
        found |= {*_in_constants(module)}
    found -= OF_KNOWN | NOT_OF_AN_ENGINE.get(file, set()) | OF_OTHERS.get(file, set())
    return {Word(file, name) for name in found | {*_imported_names(sources, module)} if name not in ENGINES}


def _imports(module: Module) -> Mapping[str, Import]:
    return {
        name: bound
        for node in ast.walk(module.tree)
        for name, bound in imported(node, module.name.rpartition(".")[0])
    }


def _imported_names(sources: Sources, module: Module) -> Iterator[str]:
    """Yield the engine's names and modules that a module imports and does not do without."""
    without = {*guarded_imports(module)}
    for bound in {*_imports(module).values()} - without:
        if bound.module.partition(".")[0] == sources.theirs:
            is_module = bound.name is not None and sources.module(f"{bound.module}.{bound.name}") is not None
            if is_module:
                yield f"{bound.module}.{bound.name}"
            else:
                yield from (bound.module, *filter(None, [bound.name]))


def _attributes(module: Module) -> Iterator[str]:
    """Yield attributes of objects that are not imported, unless this package or verl defines them."""
    imports = _imports(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr not in own_names():
            if not isinstance(node.value, ast.Name) or node.value.id not in imports:
                yield node.attr


def _keywords(module: Module) -> Iterator[str]:
    """Yield the keywords in calls of classes of verl, which may be subclasses of the engine's."""
    imports = _imports(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper():
            if node.func.id in imports and imports[node.func.id].module.partition(".")[0] == "verl":
                yield from (keyword.arg for keyword in node.keywords if keyword.arg is not None)


def _in_constants(module: Module) -> Iterator[str]:
    for statement in module.tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            for node in ast.walk(statement.value):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and node.value.isidentifier()
                ):
                    yield node.value


def names_in(contract: EngineContract, *, signatures: bool) -> set[str]:
    """Return the names in a contract, also of parameters."""
    alternatives = [one for need in contract.needs for one in need.alternatives]
    shapes = [contract.shapes[str(one)] or "" for one in alternatives] if signatures else []
    return {one.name for one in alternatives}.union(*(re.findall(r"\w+", shape) for shape in shapes))


def spare_names(contract: EngineContract) -> set[str]:
    """Return the names without which an engine would still meet each need that has them."""
    spare: dict[str, bool] = {}
    for need in contract.needs:
        met = {one.name for one in need.alternatives if (contract.shapes[str(one)] is None) == one.absent}
        for one in need.alternatives:
            spare[one.name] = spare.get(one.name, True) and bool(met - {one.name})
    return {name for name, is_spare in spare.items() if is_spare}


@cache
def own_names() -> frozenset[str]:
    """Return what this package and verl define: functions, classes, fields and attributes."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    texts = (file.read_bytes() for file in Path(spec.submodule_search_locations[0]).rglob("*.py"))
    found = {name.decode() for text in texts for names in _DEFINED.findall(text) for name in names if name}
    for module in MODULES:
        for node in nodes_of(module):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
    return frozenset(found)


_DEFINED = re.compile(rb"(?m)^\s*(?:async )?(?:def|class) (\w+)|^\s+(\w+) ?:|\.(\w+)(?:: [^=\n]+)? = ")
_NAMED = re.compile(rb"""(?:def|class) (\w+)|(\w+) ?(?::|=(?!=))|["'](\w+)["']""")

# Renaming.


class RenamedEngine:
    """An installed engine in which words can be renamed. What does not change is read and parsed once."""

    def __init__(self, engine: EngineTree) -> None:
        self._engine, self._contract = engine, SHIPPED[engine.name]
        self._read, self._parse = cache(Path.read_bytes), cache(ast.parse)
        self._defined: dict[Path, Mapping[str, set[int]]] = {}
        plain = self._sources(self._read)
        (other,) = {*ENGINES} - {engine.name}
        shared = {*declared.table_of(other).files}
        of_other = names_in(SHIPPED[other], signatures=True) - names_in(self._contract, signatures=False)
        found = set().union(*(words_of(plain, file) for file in plain.files or ()))
        self.words = sorted(
            word
            for word in found
            if "." in word.name or word.name in self._all - spare_names(self._contract)
            if word.file not in shared or word.name not in of_other
        )

    def reported(self, word: Word) -> bool:
        """Return whether the comparison names a word that is renamed."""
        texts = dict(self._renamed(word.name))
        base = self._engine.folder.joinpath(*word.name.split(".")[1:])
        hidden = {base.with_suffix(".py"), base / "__init__.py"} if "." in word.name else set()
        sources = self._sources(lambda file: texts.get(file) or self._read(file), hidden)
        return any(
            word.name in re.findall(r"[\w.]+" if hidden else r"\w+", f"{found.name} {found.change}")
            for found in engines.compare(self._engine, self._contract, sources).differences
        )

    def _sources(self, read: Callable[[Path], bytes], hidden: Set[Path] = frozenset()) -> Sources:
        plain = declared.sources_of(self._engine.name, self._engine.folder)
        return dataclasses.replace(
            plain,
            read=read,
            parse=self._parse,
            exists=lambda file: file not in hidden and file.is_file(),
        )

    def _renamed(self, name: str) -> Iterator[tuple[Path, bytes]]:
        """Yield the files that define a word, with the word renamed in the lines that do."""
        word, new = rb"\b%b\b" % name.encode(), b"%b_renamed" % name.encode()
        for file in (self._engine.folder / one for one in self._contract.files):
            if not file.is_file() or name.encode() not in self._read(file):
                continue
            if file not in self._defined:
                self._defined[file] = definitions(self._parse(self._read(file)))
            if found := self._defined[file].get(name):
                lines = self._read(file).splitlines(keepends=True)
                for line in found:
                    lines[line - 1] = re.sub(word, new, lines[line - 1])
                yield file, b"".join(lines)

    @cached_property
    def _all(self) -> set[str]:
        """What the files of the engine define."""
        texts = (file.read_bytes() for file in self._engine.folder.rglob("*.py"))
        return {name.decode() for text in texts for names in _NAMED.findall(text) for name in names if name}


def definitions(tree: ast.Module) -> Mapping[str, set[int]]:
    """Return the lines that define a name."""
    found: dict[str, set[int]] = defaultdict(set)
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                # The line of a definition with decorators is the one of its name.
                found[name].add(node.lineno)
            case (
                ast.Attribute(attr=name, ctx=ast.Store())
                | ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.Constant(value=str(name))
            ):
                found[name].add(node.end_lineno or node.lineno)
    return found


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[RenamedEngine]:
    """An installed engine of the tested release."""
    installed_engine = INSTALLED.get(request.param)
    if installed_engine is None or not SHIPPED[request.param].is_of(installed_engine):
        pytest.skip(f"reads {request.param} {SHIPPED[request.param].version}, which is not installed")
    # Each collection of garbage would walk all parsed files.
    gc.disable()
    yield RenamedEngine(installed_engine)
    gc.enable()


@pytest.mark.slow
def test_forty_words_that_are_drawn_and_renamed_are_all_reported(engine: RenamedEngine) -> None:
    drawn = random.Random(SEED).sample(engine.words, DRAWN)
    assert [word for word in drawn if not engine.reported(word)] == []


@pytest.mark.nightly
def test_each_word_that_is_renamed_is_reported(engine: RenamedEngine) -> None:
    assert [word for word in engine.words if not engine.reported(word)] == []
