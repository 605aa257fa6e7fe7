# SPDX-License-Identifier: Apache-2.0
"""What the code of this package uses of verl: names, calls, overridden and inherited members.

Derived from the syntax alone. Not seen: members of objects that verl hands over, such as its trainer's
worker groups, except through attributes that a class annotates; and classes that are built at run time.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from . import signatures
from .signatures import CallShape, Signature
from .sources import OURS, ClassMember, Definition, Import, Module, Sources, decorators, imported, own_members

_DOTTED = r"(?:pkg://)?({}(?:\.\w+)+)"
_BY_NAME = ("getattr", "setattr")

How = Literal["imports", "uses", "calls", "overrides", "inherits", "replaces"]


@dataclass(frozen=True, kw_only=True)
class Use:
    """One use of something in verl."""

    place: str
    """As this package names it: `module:Name` or `module:Class.member`."""
    how: How
    where: str
    """File and line, relative to this package."""
    call: CallShape | None = None
    signature: Signature | None = None
    """Of the overriding method, or the function that replaces another one."""


@dataclass(frozen=True, kw_only=True)
class Subclass:
    """A class of this package with a class of verl above it."""

    found: Definition
    bases: tuple[str, ...]
    """Places of the nearest classes of verl."""


def uses_of(sources: Sources) -> Iterator[Use]:
    """Yield every use, module by module."""
    for module in sources.own_modules():
        aliases = _aliases(sources, module)
        yield from _named(sources, module, aliases)
        yield from _through_attributes(sources, module, aliases)
    for subclass in subclasses(sources):
        yield from _inherited(sources, subclass)


def _aliases(sources: Sources, module: Module) -> Mapping[str, Import]:
    """Return the names that imports of verl bind anywhere in a module."""
    if module.name not in sources.imports:
        sources.imports[module.name] = {
            name: bound
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name, bound in imported(node, _package_of(module))
            if bound.module.split(".")[0] == sources.theirs
        }
    return sources.imports[module.name]


def _package_of(module: Module) -> str:
    return module.name.rpartition(".")[0]


def _named(sources: Sources, module: Module, aliases: Mapping[str, Import]) -> Iterator[Use]:
    """Yield imports, members of what was imported, calls, and paths in strings."""
    dotted = re.compile(_DOTTED.format(sources.theirs))
    rows = [*_rows(module)]
    yield from _replaced(sources, module, rows)
    in_rows = {id(row.args[0]) for row in rows}
    for node in ast.walk(module.tree):
        where = _where(module, node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_rows:
            match = dotted.fullmatch(node.value)
            if match and (place := _path(sources, match[1])):
                yield Use(place=place, how="uses", where=where)
        elif not aliases:
            continue
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for _, bound in imported(node, _package_of(module)):
                if bound.module.split(".")[0] == sources.theirs:
                    yield Use(place=_place(sources, bound), how="imports", where=where)
        elif isinstance(node, ast.Attribute) and (place := _chain(sources, node, aliases)):
            yield Use(place=place, how="uses", where=where)
        elif isinstance(node, ast.Call):
            yield from _call(sources, node, aliases, where)


def _rows(module: Module) -> Iterator[ast.Call]:
    """Yield the rows of the table of replacements, `verl_bridge/replaced.py`."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Name(id="Replacement"), args=[ast.Constant(), ast.Constant(), *_]):
                yield node


def _replaced(sources: Sources, module: Module, rows: Iterable[ast.Call]) -> Iterator[Use]:
    """Yield what rows replace, if it exists: a row may also add a name."""
    for row in rows:
        package, name = (str(ast.literal_eval(argument)) for argument in row.args[:2])
        place = f"{package}:{name}"
        if package.split(".")[0] == sources.theirs and sources.at(place) is not None:
            signature = _signature_in_its_place(sources, row)
            yield Use(place=place, how="replaces", where=_where(module, row), signature=signature)


def _signature_in_its_place(sources: Sources, row: ast.Call) -> Signature | None:
    """Return the signature of the function that replaces another one, or None for values and wrappers."""
    given = [*row.args[2:3], *(keyword.value for keyword in row.keywords if keyword.arg == "by")]
    module, colon, name = str(ast.literal_eval(given[0])).partition(":")
    if not colon or any(keyword.arg == "wraps" for keyword in row.keywords):
        return None
    found = sources.at(f"{OURS}.verl_bridge.{module}:{name}")
    node = found.node if found is not None else None
    return signatures.of_function(node) if isinstance(node, signatures.FunctionNode) else None


def _place(sources: Sources, bound: Import) -> str:
    """Return the place of an import; a folder without `__init__.py` is no module, but what it has may be."""
    if bound.name is None:
        return bound.module
    below = f"{bound.module}.{bound.name}"
    is_module = sources.module(bound.module) is None and sources.module(below) is not None
    return below if is_module else f"{bound.module}:{bound.name}"


def _chain(sources: Sources, node: ast.AST, aliases: Mapping[str, Import]) -> str | None:
    """Return the place of a dotted expression that begins with an imported name, or None."""
    if isinstance(node, ast.Name):
        return _place(sources, aliases[node.id]) if node.id in aliases else None
    if not isinstance(node, ast.Attribute):
        return None
    left = _chain(sources, node.value, aliases)
    return None if left is None else _below(sources, left, node.attr)


def _below(sources: Sources, left: str, name: str) -> str | None:
    """Return the place of a member of a module or a class, or None if it has no such member."""
    found = sources.at(left)
    if not isinstance(found, Definition):
        return None
    if found.kind == "module":
        inner = sources.find(found.module.name, name)
        if inner is None:
            return None
        return inner.module.name if inner.kind == "module" else f"{found.module.name}:{name}"
    if found.kind == "class" and name in sources.members(found):
        return f"{left}.{name}"
    return None


def _path(sources: Sources, dotted: str) -> str | None:
    """Return the place of a dotted path in a string, or None if it leads to nothing."""
    if sources.module(dotted) is not None:
        return dotted
    module, _, name = dotted.rpartition(".")
    return f"{module}:{name}" if sources.find(module, name) else None


def _call(sources: Sources, node: ast.Call, aliases: Mapping[str, Import], where: str) -> Iterator[Use]:
    if isinstance(node.func, ast.Name) and node.func.id in _BY_NAME and len(node.args) > 1:
        target, name = node.args[:2]
        left = _chain(sources, target, aliases)
        if left and isinstance(name, ast.Constant) and (place := _below(sources, left, str(name.value))):
            yield Use(place=place, how="uses", where=where)
        return

    place = _chain(sources, node.func, aliases)
    found = None if place is None else sources.at(place)
    if place is None or found is None:
        return
    call = signatures.of_call(node)
    if isinstance(found, Definition) and found.kind == "class":
        yield Use(place=f"{place}.__init__", how="calls", where=where, call=call)
    elif isinstance(found, Definition) and found.kind == "function":
        yield Use(place=place, how="calls", where=where, call=call)


def subclasses(sources: Sources) -> Iterator[Subclass]:
    """Yield the classes of this package that have a class of verl above them."""
    for module in sources.own_modules():
        for name, node in module.names.items():
            if isinstance(node, ast.ClassDef):
                found = Definition(kind="class", module=module, name=name, node=node)
                bases = tuple(dict.fromkeys(_their_bases(sources, found)))
                if bases:
                    yield Subclass(found=found, bases=bases)


def _their_bases(sources: Sources, found: Definition) -> Iterator[str]:
    """Yield the places of verl's classes that a class, or one of this package above it, names as bases."""
    aliases = _aliases(sources, found.module)
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        place = _chain(sources, base, aliases)
        if place is not None:
            yield place
        else:
            above = sources.expression(found.module, base)
            if above is not None and above.kind == "class" and above.module.name.startswith(OURS):
                yield from _their_bases(sources, above)


def own_of(sources: Sources, found: Definition) -> list[Definition]:
    """Return a class and its ancestors, as far as this package defines them."""
    return [owner for owner in sources.ancestors(found) if owner.module.name.startswith(OURS)]


def _inherited(sources: Sources, subclass: Subclass) -> Iterator[Use]:
    """Yield the members of verl's classes that a class of this package overrides or uses."""
    own = own_of(sources, subclass.found)
    defined: dict[str, ClassMember] = {}
    for owner in own:
        for name, member in own_members(owner).items():
            if not isinstance(member.node, ast.Attribute):  # assigned in a method: verl may define it
                defined.setdefault(name, member)

    for place in subclass.bases:
        base = sources.at(place)
        if not isinstance(base, Definition) or base.kind != "class":
            continue
        theirs = {
            name: member
            for name, member in sources.members(base).items()
            if not member.owner.module.name.startswith(OURS)
        }
        for name, member in defined.items():
            if name in theirs and not (name.startswith("__") and name != "__init__"):
                yield _override(f"{place}.{name}", member)
        for owner in own:
            yield from _through_self(owner, place, set(theirs), set(defined))


def _through_attributes(sources: Sources, module: Module, aliases: Mapping[str, Import]) -> Iterator[Use]:
    """Yield what methods take from attributes of `self` that their class annotates with a class of verl."""
    for owner in module.tree.body:
        if not isinstance(owner, ast.ClassDef):
            continue
        typed = {
            node.target.id: place
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            if (place := _chain(sources, node.annotation, aliases))
        }
        for node in ast.walk(owner) if typed else ():
            match node:
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name)) if (
                    name in typed
                ):
                    if place := _below(sources, typed[name], node.attr):
                        yield Use(place=place, how="uses", where=_where(module, node))


def _override(place: str, member: ClassMember) -> Use:
    plain = isinstance(member.node, signatures.FunctionNode) and not decorators(member.node) & {
        "property",
        "staticmethod",
        "classmethod",
    }
    assert isinstance(member.node, ast.stmt)
    return Use(
        place=place,
        how="overrides",
        where=_where(member.owner.module, member.node),
        signature=signatures.of_function(member.node)
        if plain and isinstance(member.node, signatures.FunctionNode)
        else None,
    )


def _through_self(owner: Definition, place: str, theirs: set[str], defined: set[str]) -> Iterator[Use]:
    """Yield what the methods of a class take from `self` or `super()` that verl's class defines."""
    assert isinstance(owner.node, ast.ClassDef)
    called: dict[int, CallShape] = {}
    for node in ast.walk(owner.node):
        if isinstance(node, ast.Call):
            called[id(node.func)] = signatures.of_call(node)
        if not isinstance(node, ast.Attribute) or node.attr not in theirs:
            continue
        is_super = ast.unparse(node.value) == "super()"
        is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if is_super or (is_self and node.attr not in defined):
            yield Use(
                place=f"{place}.{node.attr}",
                how="calls" if id(node) in called else "inherits",
                where=_where(owner.module, node),
                call=called.get(id(node)),
            )


def _where(module: Module, node: ast.AST) -> str:
    path = module.name.removeprefix(OURS).lstrip(".").replace(".", "/")
    return f"{path}.py:{getattr(node, 'lineno', 0)}"
