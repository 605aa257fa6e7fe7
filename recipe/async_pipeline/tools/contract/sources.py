# SPDX-License-Identifier: Apache-2.0
"""Two source trees as one name space: this package's, and the one of verl or of an engine; parsed on use.

A *place* is `module` or `module:Name` or `module:Class.member`, where the thing is defined; names are
followed through re-exports.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipe.async_pipeline.errors import ContractError

from . import signatures

OURS, THEIRS = "recipe.async_pipeline", "verl"
_MAX_HOPS = 12
"""Re-exports that are followed from one name; a cycle ends here."""

DefinitionKind = Literal["module", "class", "function", "value"]


@dataclass(frozen=True)
class Import:
    """A name that a module imports: a module, or `name` of it."""

    module: str
    name: str | None


@dataclass(frozen=True, kw_only=True)
class Module:
    """One parsed file."""

    name: str
    tree: ast.Module
    names: Mapping[str, ast.AST | Import]
    """What each name at the top of the module is bound to."""
    stars: tuple[str, ...]
    """Modules from which it imports everything."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What a name leads to."""

    kind: DefinitionKind
    module: Module
    name: str = ""
    node: ast.AST | None = None

    @property
    def place(self) -> str:
        """Where it is defined."""
        return f"{self.module.name}:{self.name}" if self.name else self.module.name


@dataclass(frozen=True, kw_only=True)
class ClassMember:
    """A member of a class: a method, or a value."""

    owner: Definition
    node: ast.AST
    abstract: bool = False
    is_late: bool = False
    """Whether it is of a mixin in which no method that initializes assigns it, only others."""


@dataclass(kw_only=True)
class Sources:
    """The modules of both packages."""

    roots: Mapping[str, Path]
    """The folder of each package."""
    theirs: str = THEIRS
    """The package whose names are followed."""
    files: tuple[str, ...] | None = None
    """The modules of this package that count, relative to it; None for all."""
    read: Callable[[Path], bytes] = Path.read_bytes
    exists: Callable[[Path], bool] = Path.is_file
    parse: Callable[[bytes], ast.Module] = ast.parse
    imports: dict[str, Mapping[str, Import]] = field(default_factory=dict)
    """By module of this package, once asked for: the names that its imports of that package bind."""
    _modules: dict[str, Module | None] = field(default_factory=dict)
    _words: dict[str, frozenset[str]] = field(default_factory=dict)
    _members: dict[str, dict[str, ClassMember]] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        """Return a module by its dotted name, or None. Raises ContractError if it cannot be parsed."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def words(self, module: Module) -> frozenset[str]:
        """Return the attributes that a module assigns, and its string literals, which may name some."""
        if module.name not in self._words:
            self._words[module.name] = assigned_words(module)
        return self._words[module.name]

    def own_modules(self) -> Iterator[Module]:
        """Parse the modules of this package that count, in the order of their names."""
        root = self.roots[OURS]
        files = root.rglob("*.py") if self.files is None else (root / file for file in self.files)
        for file in sorted(files):
            parts = file.relative_to(root).with_suffix("").parts
            dotted = ".".join([OURS, *(part for part in parts if part != "__init__")])
            module = self.module(dotted)
            assert module is not None
            yield module

    def _load(self, name: str) -> Module | None:
        top = next((top for top in self.roots if name == top or name.startswith(f"{top}.")), None)
        if top is None:
            return None
        base = self.roots[top].joinpath(*filter(None, name.removeprefix(top).split(".")))
        file, is_package = base.with_suffix(".py"), False
        if self.exists(base / "__init__.py"):
            file, is_package = base / "__init__.py", True
        elif not self.exists(file):
            return None

        try:
            tree = self.parse(self.read(file))
        except SyntaxError as error:
            raise ContractError(f"{file} cannot be parsed: {error}; check the tree") from None
        package = name if is_package else name.rpartition(".")[0]
        names: dict[str, ast.AST | Import] = {}
        stars: list[str] = []
        for node in _top_statements(tree.body):
            _bind(node, package, names, stars)
        return Module(name=name, tree=tree, names=names, stars=tuple(stars))

    def find(self, module_name: str, name: str | None = None, hops: int = 0) -> Definition | None:
        """Return what `name` of a module is, or the module; None if it is missing or in another package."""
        module = self.module(module_name)
        if module is None:
            return None
        if name is None:
            return Definition(kind="module", module=module)
        if hops > _MAX_HOPS:
            return None

        bound = module.names.get(name)
        if isinstance(bound, Import):
            found = self.find(bound.module, bound.name, hops + 1)
            if (
                found is None
                and bound.module.split(".")[0] != self.theirs
                and not bound.module.startswith(OURS)
            ):
                return Definition(kind="value", module=module, name=name)  # of a third package
            return found
        if bound is not None:
            return Definition(kind=_kind(bound), module=module, name=name, node=bound)
        for star in module.stars:
            if found := self.find(star, name, hops + 1):
                return found
        below = self.module(f"{module_name}.{name}")
        return None if below is None else Definition(kind="module", module=below)

    def at(self, place: str) -> Definition | ClassMember | None:
        """Return what is at a place, or None."""
        module, _, rest = place.partition(":")
        name, _, member = rest.partition(".")
        found = self.find(module, name or None)
        if found is None or not member:
            return found
        result = self.members(found).get(member) if found.kind == "class" else None
        # A base's stub says what a subclass should have, not that it has it; so does a mixin that changes it.
        inherited = result is not None and result.owner.place != found.place
        missing = result is not None and inherited and (result.is_late or _is_stub(result.node))
        return None if missing else result

    def bases(self, found: Definition) -> Iterator[Definition]:
        """Yield the bases of a class that are in either package."""
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            above = self.expression(found.module, expression)
            if above is not None and above.kind == "class" and above.node is not None:
                yield above

    def expression(self, module: Module, node: ast.AST) -> Definition | None:
        """Return what a dotted expression at the top of a module leads to, or None."""
        if isinstance(node, ast.Name):
            return self.find(module.name, node.id) if node.id in module.names or module.stars else None
        if isinstance(node, ast.Attribute):
            left = self.expression(module, node.value)
            if left is not None and left.kind == "module":
                return self.find(left.module.name, node.attr)
        return None

    def ancestors(self, found: Definition) -> list[Definition]:
        """Return a class and its ancestors in both packages, nearest first."""
        result: dict[str, Definition] = {}
        queue = [found]
        while queue:
            current = queue.pop(0)
            if current.place not in result:
                result[current.place] = current
                queue = [*self.bases(current), *queue]
        return list(result.values())

    def members(self, found: Definition) -> dict[str, ClassMember]:
        """Return the members of a class by name, with the inherited ones."""
        if found.place not in self._members:
            result = self._members[found.place] = {}
            for owner in self.ancestors(found):
                for name, member in own_members(owner).items():
                    result.setdefault(name, member)
        return self._members[found.place]


def own_members(owner: Definition) -> dict[str, ClassMember]:
    """Return what the body of a class defines, and what its methods assign to `self`."""
    assert isinstance(owner.node, ast.ClassDef)
    result: dict[str, ClassMember] = {}
    for node in _top_statements(owner.node.body):
        for name in _bound_names(node):
            result[name] = ClassMember(owner=owner, node=node, abstract=_is_abstract(node))

    methods = [m.node for m in result.values() if isinstance(m.node, signatures.FunctionNode)]
    for method in sorted(methods, key=lambda method: not _initializes(method)):
        for target in _targets(method):
            match target:
                case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                    late = "Mixin" in owner.name and not _initializes(method)
                    result.setdefault(name, ClassMember(owner=owner, node=target, is_late=late))
    return result


def _initializes(method: signatures.FunctionNode) -> bool:
    return method.name.lstrip("_").startswith("init")


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in what the statements below one assign to; expressions assign no attributes."""
    parts = (getattr(node, part, ()) for part in ("body", "orelse", "finalbody", "handlers", "cases"))
    for inner in (inner for part in parts for inner in part):
        several = [*getattr(inner, "targets", ()), getattr(inner, "target", None)]
        several += [item.optional_vars for item in getattr(inner, "items", ())]
        for target in several:
            yield from () if target is None else ast.walk(target)
        yield from _targets(inner)


def _is_abstract(node: ast.AST) -> bool:
    names = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(name.endswith("abstractmethod") for name in names)


def _is_stub(node: ast.AST) -> bool:
    """Return whether a member only announces what a subclass defines."""
    if isinstance(node, ast.AnnAssign):
        is_empty = node.value is not None and ast.unparse(node.value) in ("None", "{}", "[]", "()")
        return is_empty and "ClassVar" in ast.unparse(node.annotation)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    body = [
        one for one in node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    ]
    return _is_abstract(node) or all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Raise) and "NotImplementedError" in ast.unparse(one))
        for one in body
    )


def decorators(node: ast.AST) -> set[str]:
    """Return the plain names of a definition's decorators."""
    return {ast.unparse(d).rpartition(".")[2] for d in getattr(node, "decorator_list", [])}


def _kind(node: ast.AST) -> DefinitionKind:
    if isinstance(node, ast.ClassDef):
        return "class"
    return "function" if isinstance(node, signatures.FunctionNode) else "value"


def _top_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a body runs: also those in `if`, `try` and `with`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _top_statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _top_statements(handler.body)


def _bound_names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def _bind(node: ast.stmt, package: str, names: dict[str, ast.AST | Import], stars: list[str]) -> None:
    """Add what a statement at the top of a module binds."""
    for name in _bound_names(node):
        if not isinstance(names.get(name), ast.ClassDef):  # a fallback in `except` is not the definition
            names[name] = node
    for name, bound in imported(node, package):
        if name == "*":
            stars.append(bound.module)
        else:
            names[name] = bound


def imported(node: ast.AST, package: str) -> Iterator[tuple[str, Import]]:
    """Yield the names that an import statement binds in a module of `package`."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            whole = alias.name if alias.asname else alias.name.split(".")[0]
            yield alias.asname or whole, Import(whole, None)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = parts[: len(parts) - node.level + 1] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        for alias in node.names:
            yield alias.asname or alias.name, Import(module, alias.name)


def guarded_imports(module: Module) -> Iterator[Import]:
    """Yield what a module imports in `try` or `suppress` and does without if that fails."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Try):
            handled = [handler.type for handler in node.handlers if handler.type is not None]
        elif isinstance(node, ast.With):
            handled = [item.context_expr for item in node.items]
        else:
            continue
        if any(name in ast.unparse(one) for one in handled for name in ("ImportError", "ModuleNotFound")):
            package = module.name.rpartition(".")[0]
            for inner in (inner for statement in node.body for inner in ast.walk(statement)):
                yield from (bound for _, bound in imported(inner, package))


def words_in(module: Module) -> frozenset[str]:
    """Return the attributes and the string literals that occur in a module."""
    return assigned_words(module) | {
        node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)
    }


def assigned_words(module: Module) -> frozenset[str]:
    """Return the attributes that a module assigns, and its string literals, which may name some."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found)
