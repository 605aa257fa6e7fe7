# SPDX-License-Identifier: Apache-2.0
"""The keys of verl's configuration that this package names, found in its code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .sources import Sources

_ROOTS = ("config", "_config")
_PATH = re.compile(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+")


def named_keys(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield the paths that this package may mean as keys, with their files: strings and `config.a.b`."""
    for module in sources.own_modules():
        file = module.name.partition("async_pipeline.")[2].replace(".", "/") + ".py"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _PATH.fullmatch(node.value):
                    yield node.value, file
            elif isinstance(node, ast.Attribute):
                for path in _chain(node):
                    yield path, file


def _chain(node: ast.Attribute) -> Iterator[str]:
    """Yield the path of `config.a.b` and of `self.config.a.b`."""
    parts: list[str] = []
    left: ast.expr = node
    while isinstance(left, ast.Attribute):
        parts.append(left.attr)
        left = left.value
    if not isinstance(left, ast.Name):
        return
    names = [left.id, *reversed(parts)]
    at = 1 if names[0] == "self" else 0
    if names[at] in _ROOTS and len(names) > at + 2:
        yield ".".join(names[at + 1 :])
