# SPDX-License-Identifier: Apache-2.0
"""Where this package calls, assigns or replaces a member of an engine, found by the member's name.

Several classes may have a member of that name: `engines.py` reports only uses that fitted before. Protocols
describe what an engine has, and variables with an object of this package have none of its members.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from . import signatures
from .declared import Alternative, module_of
from .signatures import CallShape, Signature
from .sources import OURS, Module, Sources
from .uses import uses_of


@dataclass(frozen=True, kw_only=True)
class MemberUse:
    """One use of a member."""

    where: str
    how: Literal["calls", "stores", "replaces"]
    call: CallShape | None = None
    signature: Signature | None = None
    """Of the function that takes the member's place."""

    def conflict(self, now: Signature, shape: str) -> str | None:
        """Return why the use does not fit a signature, or None. `shape` is the text of the signature."""
        if self.call is not None:
            bound = now.positional[:1] in (("self",), ("cls",)) and not shape.startswith("static")
            return (now.without_self() if bound else now).refuses(self.call)
        if self.signature is not None:
            return signatures.override_conflict(self.signature, now, caller="the engine")
        return None


class Located:
    """The uses of members in the files of this package that use an engine."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    @cached_property
    def _derived(self) -> dict[str, list[MemberUse]]:
        """By place, what follows from imports and subclasses."""
        found: dict[str, list[MemberUse]] = defaultdict(list)
        for use in uses_of(self._sources):
            if use.call is not None:
                found[use.place].append(MemberUse(where=use.where, how="calls", call=use.call))
            elif use.signature is not None:
                found[use.place].append(MemberUse(where=use.where, how="replaces", signature=use.signature))
        return found

    def of(self, alternative: Alternative, files: Sequence[str]) -> Iterator[MemberUse]:
        """Yield the uses of a member in some files."""
        yield from self._derived[alternative.place]
        for file in () if alternative.name.startswith("__") else files:
            yield from _named(module_of(self._sources, file), file, alternative.name)


def _named(module: Module, file: str, name: str) -> Iterator[MemberUse]:
    kept, replacing = _kept_as(module, name), _replacing(module, name)
    variables = _kept_in(module, name)
    own_objects, in_protocols = _own_objects(module), _in_protocols(module)
    for node in ast.walk(module.tree):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if node in in_protocols or (isinstance(node, ast.Call) and _receiver(node) in own_objects):
            continue
        if isinstance(node, ast.Call) and (
            (isinstance(node.func, ast.Attribute) and node.func.attr in kept)
            or (isinstance(node.func, ast.Name) and node.func.id in variables)
        ):
            yield MemberUse(where=where, how="calls", call=signatures.of_call(node))
        elif isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
            yield MemberUse(where=where, how="stores")
        elif isinstance(node, signatures.FunctionNode) and node.name in replacing:
            own = signatures.of_function(node)
            if own.positional[:1] == ("self",):
                yield MemberUse(where=where, how="replaces", signature=own)


def _in_protocols(module: Module) -> set[ast.AST]:
    """Return what the protocols of a module consist of."""
    return {
        node
        for owner in ast.walk(module.tree)
        if isinstance(owner, ast.ClassDef) and "Protocol" in {_named_class(base) for base in owner.bases}
        for node in ast.walk(owner)
    }


def _own_objects(module: Module) -> set[str]:
    """Return the variables that hold nothing but new objects of classes of this package."""
    classes = {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)} | {
        alias.asname or alias.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(OURS))
        for alias in node.names
        if alias.name[:1].isupper()  # A function may return an engine's object.
    }
    new: dict[str, bool] = {
        node.arg: False for node in ast.walk(module.tree) if isinstance(node, ast.arg)
    }  # A parameter may be an engine's object.
    for target, value in _assigned(module):
        if isinstance(target, ast.Name):
            made = isinstance(value, ast.Call) and _named_class(value.func) in classes
            new[target.id] = made and new.get(target.id, True)
    return {name for name, made in new.items() if made}


def _named_class(node: ast.expr) -> str | None:
    """Return the name in `Name` or `Name[...]`, or None."""
    inner = node.value if isinstance(node, ast.Subscript) else node
    return inner.id if isinstance(inner, ast.Name) else None


def _receiver(node: ast.Call) -> str | None:
    """Return the variable whose member is called, or None."""
    return _named_class(node.func.value) if isinstance(node.func, ast.Attribute) else None


def _assigned(module: Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield target and value of the assignments in a module."""
    for node in ast.walk(module.tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            assert isinstance(node, ast.Assign)
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            targets = target.elts if both and isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if both and isinstance(node.value, ast.Tuple) else [node.value]
            yield from zip(targets, values, strict=False)


def _kept_as(module: Module, name: str) -> set[str]:
    """Return a member's name, and the attributes that keep it: `self._send = manager.send`."""
    kept = (
        target.attr
        for target, value in _assigned(module)
        if isinstance(target, ast.Attribute) and isinstance(value, ast.Attribute) and value.attr == name
    )
    return {name, *kept}


def _kept_in(module: Module, name: str) -> set[str]:
    """Return the variables that keep a member: `send = manager.send`."""
    return {
        target.id
        for target, value in _assigned(module)
        if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and value.attr == name
    }


def _replacing(module: Module, name: str) -> set[str]:
    """Return a member's name, and the methods that replace it: `manager.send = self._send_one`."""
    replacing = (
        value.attr
        for target, value in _assigned(module)
        if isinstance(target, ast.Attribute) and isinstance(value, ast.Attribute) and target.attr == name
    )
    return {name, *replacing}
