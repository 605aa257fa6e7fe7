# SPDX-License-Identifier: Apache-2.0
"""The keys of verl's configuration that this package names, and the keys that a verl tree has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .sources import Sources

COMPOSED = ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml")
"""verl's whole configurations, composed."""
OF_ALL_ENGINES = (*COMPOSED, "_generated_ppo_torchtitan_trainer.yaml", "_generated_ppo_veomni_trainer.yaml")
FOLDER = Path("verl/trainer/config")
_ROOTS = ("config", "_config")
_PATH = re.compile(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+")


def keys_of_tree(root: Path, names: Iterable[str] = COMPOSED) -> dict[str, Mapping[str, Any]]:
    """Return verl's composed configurations by the names of their files; empty if there are none."""
    import yaml

    # The loader in Python takes half a second for a file.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = [root / FOLDER / name for name in names]
    return {file.name: yaml.load(file.read_bytes(), Loader=loader) for file in files if file.is_file()}


def has(tree: Mapping[str, Any], path: str) -> bool:
    """Return whether a configuration has a key at `path`."""
    node: Any = tree
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


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
