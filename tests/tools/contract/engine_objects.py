# SPDX-License-Identifier: Apache-2.0
"""Where a module takes something from an object of an engine, found by annotations.

An object may be an engine's if it is imported from one, if its annotation has `Any`, a protocol or torch's
`Module`, if it has no annotation, if a class inherits it from another package, or if it comes from such an
object: by a member, an item, a call, an assignment, a loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from recipe.async_pipeline.installed.engines import ENGINES
from recipe.async_pipeline.tools.contract.sources import (
    OURS,
    Definition,
    Import,
    Module,
    Sources,
    imported,
    own_members,
)

_OPEN = {"Any", "Module"}
_PASS_ON = {"copy", "enumerate", "getattr", "iter", "list", "next", "sorted", "tuple", "type", "zip"}
_BY_NAME, _BY_KEY = {"getattr", "hasattr", "setattr"}, {"get", "pop", "setdefault"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = _Function | ast.Lambda


class Access(NamedTuple):
    """Something that is taken from an object."""

    line: int
    name: str
    """A member, or a key."""


class EngineObjects:
    """The objects of one module that may be an engine's."""

    def __init__(self, sources: Sources, module: Module, inside: bool) -> None:
        """`inside`: whether the module's classes become part of a class of an engine."""
        self._sources, self._module, self._inside = sources, module, inside
        self._nodes = [*ast.walk(module.tree)]
        self._imports = {
            name: bound
            for node in self._nodes
            for name, bound in imported(node, module.name.rpartition(".")[0])
        }
        functions = [node for node in self._nodes if isinstance(node, _Function)]
        self._returns = {node.name: self._is_open(node.returns) for node in functions}
        self._members = {name for owner in self._classes() for name in own_members(owner)}
        self._fields = self._open_fields()
        self._scopes: list[dict[str, bool]] = [{}]
        self.keywords: set[str] = set()
        """Of the calls of members of the objects, once `accesses` has been read."""

    def accesses(self) -> Iterator[Access]:
        """Yield what is taken from them, by line."""
        for _ in range(2):  # what is assigned to `self` may be read above
            found = {*self._in(self._module.tree)}
        yield from sorted(found)

    def _classes(self) -> Iterator[Definition]:
        for node in self._nodes:
            if isinstance(node, ast.ClassDef):
                own = Definition(kind="class", module=self._module, name=node.name, node=node)
                yield from self._sources.ancestors(own)

    def _open_fields(self) -> dict[str, bool]:
        """Return the fields of classes that are known here, and whether they may be an engine's."""
        modules = [self._module, *(self._sources.module(one.module) for one in self._imports.values())]
        return {
            inner.target.id: self._is_open(inner.annotation)
            for module in modules
            for node in (ast.walk(module.tree) if module is not None else ())
            if isinstance(node, ast.ClassDef)
            for inner in node.body
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
        }

    def _in(self, node: ast.AST) -> Iterator[Access]:
        if isinstance(node, ast.ClassDef) and self._is_protocol(node):
            return
        if isinstance(node, _Scope):
            self._scopes.append(self._parameters(node))
            for _ in range(2):  # a variable may be assigned below
                self._assign(node)
        if isinstance(node, ast.Call) and self._is_engines(node.func):
            self.keywords |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        if (name := self._taken(node)) is not None:
            yield Access(getattr(node, "lineno", 0), name)
        for child in ast.iter_child_nodes(node):
            yield from self._in(child)
        if isinstance(node, _Scope):
            self._scopes.pop()

    def _taken(self, node: ast.AST) -> str | None:
        """Return what an expression takes from an object that may be an engine's, or None."""
        match node:
            case ast.Attribute(value=value, attr=name):
                is_own = self._is_self(value) and name in self._members
                return name if self._is_engines(value) and not is_own else None
            case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                return name if self._is_engines(value) else None
            case ast.Call(
                func=ast.Attribute(value=value, attr=how), args=[ast.Constant(value=str(name)), *_]
            ):
                return name if how in _BY_KEY and self._is_engines(value) else None
            case ast.Call(func=ast.Name(id=how), args=[value, ast.Constant(value=str(name)), *_]):
                return name if how in _BY_NAME and self._is_engines(value) else None
        return None

    def _parameters(self, node: _Scope) -> dict[str, bool]:
        a = node.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        found = {one.arg: self._is_open(one.annotation) for one in every}
        return found | {name: self._inside for name in ("self", "cls") if name in found}

    def _assign(self, node: _Scope) -> None:
        """Note the variables of a function, and what it assigns to `self`."""
        for inner in ast.walk(node):
            match inner:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._bind(target, value)
                case ast.AnnAssign(target=target, annotation=annotation):
                    self._set(target, self._is_open(annotation))
                case ast.NamedExpr(target=target, value=value):
                    self._bind(target, value)
                case ast.For() | ast.AsyncFor() | ast.comprehension():
                    self._bind(inner.target, inner.iter)
                case ast.withitem(context_expr=value, optional_vars=ast.AST() as target):
                    self._bind(target, value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._bind(one, its)
        else:
            self._set(target, self._is_engines(value))

    def _set(self, target: ast.expr, is_engines: bool) -> None:
        match target:
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                for one in elts:
                    self._set(one, is_engines)
            case ast.Starred(value=value):
                self._set(value, is_engines)
            case ast.Name(id=name):
                self._scopes[-1][name] = is_engines or self._scopes[-1].get(name, False)
            case ast.Attribute(value=value, attr=name) if self._is_self(value):
                self._fields[name] = is_engines or self._fields.get(name, False)

    def _is_engines(self, node: ast.expr) -> bool:
        """Return whether the value of an expression may be an engine's object."""
        match node:
            case ast.Name(id=name):
                known = (scope[name] for scope in reversed(self._scopes) if name in scope)
                return next(known, self._is_from_an_engine(name))
            case ast.Attribute(value=value, attr=name):
                if self._is_self(value):
                    return self._fields.get(name, name not in self._members)
                return self._is_engines(value) or self._fields.get(name, False)
            case ast.Subscript(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return self._is_engines(value)
            case ast.Call(func=func, args=args):
                return self._gives_engines(func, args)
            case ast.BoolOp(values=several) | ast.Tuple(elts=several) | ast.List(elts=several):
                return any(map(self._is_engines, several))
            case ast.IfExp(body=body, orelse=other):
                return self._is_engines(body) or self._is_engines(other)
            case ast.ListComp(elt=value) | ast.GeneratorExp(elt=value) | ast.DictComp(value=value):
                return self._is_engines(value)
        return False

    def _gives_engines(self, function: ast.expr, arguments: list[ast.expr]) -> bool:
        match function:
            case ast.Name(id=name) if name in self._returns:
                return self._returns[name]
            case ast.Name(id=name) if name in self._imports and not self._is_from_an_engine(name):
                bound = self._imports[name]
                found = (
                    self._sources.find(bound.module, bound.name) if bound.module.startswith(OURS) else None
                )
                return (
                    found is not None
                    and isinstance(found.node, _Function)
                    and self._is_open(found.node.returns)
                )
            case ast.Attribute(value=value, attr=name) if self._is_self(value) and name in self._returns:
                return self._returns[name]
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _PASS_ON:
                return any(map(self._is_engines, arguments))
        return self._is_engines(function)

    def _is_from_an_engine(self, name: str) -> bool:
        bound = self._imports.get(name)
        return bound is not None and bound.module.partition(".")[0] in ENGINES

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in ("self", "cls")

    def _is_open(self, annotation: ast.expr | None) -> bool:
        """Return whether an object of an annotation may be an engine's."""
        if annotation is None:
            return True
        names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(annotation)}
        return bool(names & _OPEN) or any(self._is_protocol(self._module.names.get(name)) for name in names)

    def _is_protocol(self, node: ast.AST | Import | None) -> bool:
        return isinstance(node, ast.ClassDef) and "Protocol" in {
            ast.unparse(base).partition("[")[0] for base in node.bases
        }
