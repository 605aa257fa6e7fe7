# SPDX-License-Identifier: Apache-2.0
"""What a module names of an engine by keywords: the engine's arguments, and fields of its classes.

more = {"cpu_offload": 1}
AsyncEngineArgs(model, seed=0, **more)          # the arguments seed and cpu_offload
ARGUMENT = {"vllm": "moe_backend"}              # the argument moe_backend of vLLM
TensorLoRARequest(lora_name="one")              # a field of vLLM's LoRARequest, on which verl's class is
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .sources import THEIRS, Import, Module, Sources, imported, own_members


def arguments_in(sources: Sources, module: Module) -> Iterator[str]:
    """Yield the names in a module that may be arguments of the engine of `sources`."""
    makers = _makers(sources, module)
    for scope in ast.walk(module.tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _passed(scope, makers)
    for statement in module.tree.body:
        match statement:
            case ast.Assign(value=ast.Dict() as table) | ast.AnnAssign(value=ast.Dict() as table):
                yield from _of_engine(table, sources.theirs)


def fields_in(sources: Sources, module: Module) -> Iterator[str]:
    """Yield the places of the engine's fields that are keywords in calls of verl's subclasses."""
    classes = _imported_from(THEIRS, module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
            bound = classes[node.func.id]
            found = sources.find(bound.module, bound.name)
            above = sources.ancestors(found) if found is not None and found.kind == "class" else []
            for owner in (one for one in above if one.module.name.split(".")[0] == sources.theirs):
                fields = own_members(owner)
                named = [keyword.arg for keyword in node.keywords if keyword.arg in fields]
                yield from (f"{owner.place}.{name}" for name in named)


def _imported_from(package: str, module: Module) -> dict[str, Import]:
    """Return the names that imports of a package bind anywhere in a module."""
    return {
        name: bound
        for node in ast.walk(module.tree)
        for name, bound in imported(node, module.name.rpartition(".")[0])
        if bound.module.split(".")[0] == package
    }


def _makers(sources: Sources, module: Module) -> set[str]:
    """Return the names of the engine's classes in a module, and of the subclasses that it defines."""
    found = set(_imported_from(sources.theirs, module))
    classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    return found | {
        owner.name for owner in classes for base in owner.bases if getattr(base, "id", "") in found
    }


def _passed(scope: ast.AST, makers: set[str]) -> Iterator[str]:
    """Yield the keywords of calls of some classes, with the keys of what `**` passes on."""
    spread: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers:
            yield from (keyword.arg for keyword in node.keywords if keyword.arg is not None)
            spread |= {getattr(keyword.value, "id", "") for keyword in node.keywords if keyword.arg is None}
    for node in ast.walk(scope) if spread else ():
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value) if name in spread:
                yield from _keys(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name in spread:
                yield from _keys(value)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))) if name in spread:
                yield key


def _keys(value: ast.expr) -> Iterator[str]:
    for node in ast.walk(value):
        for key in node.keys if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


def _of_engine(table: ast.Dict, engine: str) -> Iterator[str]:
    """Yield the words below the engine's key."""
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == engine:
            for node in ast.walk(value):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
