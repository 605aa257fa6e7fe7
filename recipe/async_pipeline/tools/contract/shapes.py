# SPDX-License-Identifier: Apache-2.0
"""The shape of what is at a place of a tree: a module, a class, a signature, a property or a value."""

from __future__ import annotations

import ast
from typing import Any

from . import signatures
from .sources import ClassMember, Definition, Sources, decorators


def shape_of(sources: Sources, place: str) -> str | None:
    """Return the shape of what is at a place, or None if nothing is."""
    found = sources.at(place)
    if found is None and place.endswith(".__init__"):
        return _constructor(sources, place.removesuffix(".__init__"))
    if isinstance(found, ClassMember):
        return _shape(found.node)
    if found is None or found.kind != "function":
        return None if found is None else found.kind
    assert found.node is not None
    return _shape(found.node)


def _shape(node: Any) -> str:
    if not isinstance(node, signatures.FunctionNode):
        return "value"
    kinds = decorators(node)
    if kinds & {"property", "cached_property"}:
        return "property"
    if "setter" in kinds:
        return "value"  # a property that can be assigned to
    text = signatures.as_text(signatures.of_function(node))
    return " ".join([*sorted(kinds & {"staticmethod", "classmethod"}), text])


def _constructor(sources: Sources, place: str) -> str | None:
    """Return the signature of a class without `__init__`: of its fields, if it has some."""
    found = sources.at(place)
    if not isinstance(found, Definition) or found.kind != "class":
        return None
    fields: dict[str, bool] = {}
    for owner in reversed(sources.ancestors(found)):
        assert isinstance(owner.node, ast.ClassDef)
        for node in owner.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = node.value is not None
    if not fields:
        return "value"
    ordered = sorted(fields, key=lambda name: fields[name])
    return f"def ({', '.join(['self', *(f'{n}=...' if fields[n] else n for n in ordered)])})"
