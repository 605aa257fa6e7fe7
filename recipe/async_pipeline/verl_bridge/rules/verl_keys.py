# SPDX-License-Identifier: Apache-2.0
"""The keys of verl's configuration and the names in its source, read from its files without an import."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...config.keys.misplaced import ALIKE
from ...config.keys.without_effect import without_effect
from ...config.paths import OWN, nearest
from ...errors import PatchError
from ...installed.verl import COMPOSED, find_verl_root, has, keys_of_tree
from ..launch.run_config import INIT


def has_key(path: str) -> bool:
    """Return whether verl's configuration has a key."""
    return any(has(tree, path) for tree in verl_trees().values())


def engine_with(path: str) -> str:
    """Return the value of `model_engine` with which alone verl's configuration has a key, or nothing."""
    trees = verl_trees()
    having = [
        engine
        for engine, file in zip(("dp", "megatron"), COMPOSED, strict=True)
        if has(trees.get(file, {}), path)
    ]
    return having[0] if len(having) == 1 else ""


@cache
def verl_trees() -> Mapping[str, Mapping[str, Any]]:
    """Return verl's composed configurations by the names of their files; nothing if verl is not there."""
    try:
        return keys_of_tree(find_verl_root())
    except PatchError:
        return {}


def keys_without_effect(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key of verl that a config sets and nothing reads."""
    return without_effect(raw, verl_trees().values())


def is_read(path: str) -> bool:
    """Return whether verl's source may read a key: its names are attributes or texts there, or verl is not
    here.

    Arguments of Ray's start are Ray's.
    """
    if path.startswith(f"{INIT}."):
        return True
    try:
        return _words_below(find_verl_root()).issuperset(path.encode().split(b"."))
    except PatchError:
        return True


def is_read_in(section: str, name: str) -> bool:
    """Return whether verl's source may read a key of a section.

    In a section that verl makes no object of, only where the section is named before the key.
    """
    if section not in _HOLDERS:
        return is_read(name)
    try:
        root = find_verl_root() / "verl"
    except PatchError:
        return True
    places = {root: _HOLDERS[section]} | ({root / "utils" / "dataset": "config"} if section == "data" else {})
    return any(name.encode() in _read_of(held, at) for at, held in places.items())


_QUOTE = "[\"']"
_HOLDERS = {
    "": rf"config|cfg|OmegaConf\.select\(\w+, {_QUOTE}",
    "actor_rollout_ref": rf"actor_rollout_ref|{_QUOTE}actor_rollout_ref|self\.config",
    "data": rf"(?:config|cfg)\.data|data_config|dataset_config|{_QUOTE}data",
    "reward": rf"(?:config|cfg)\.reward|reward_config|{_QUOTE}reward",
    "trainer": rf"(?:config|cfg)\.trainer|trainer_config|{_QUOTE}trainer",
}
"""How verl's source names sections that it makes no objects of; the data set has its section as `config`."""


@cache
def _read_of(held: str, folder: Path) -> frozenset[bytes]:
    """Return the names that source reads of a section, by how it names that."""
    return frozenset(re.findall(rf"(?:{held})(?:\.get\(\s*|\.|\[){_QUOTE}?(\w+)".encode(), _source(folder)))


@cache
def _source(folder: Path) -> bytes:
    return b"\n".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))


@cache
def _words_below(root: Path) -> frozenset[bytes]:
    return frozenset(re.findall(rb"[.\"'](\w+)", _source(root / "verl")))


def near_key(path: str) -> str | None:
    """Return the key of verl that a path resembles: its name, or all of it if a section is misspelled.

    A section alone if that is misspelled and has no such key.
    """
    if path.startswith(f"{OWN}."):
        return None
    *sections, last = path.split(".")
    nodes: list[Mapping[str, Any]] = list(verl_trees().values())
    found = list[str]()
    for name in sections:
        inner = {key for node in nodes for key, value in node.items() if isinstance(value, Mapping)}
        if (near := name if name in inner else nearest(name, inner, ALIKE)) is None:
            return None
        found.append(near)
        nodes = [node[near] for node in nodes if isinstance(node.get(near), Mapping)]
    known = {str(key) for node in nodes for key, value in node.items() if not isinstance(value, Mapping)}
    if found != sections and last in known:
        return ".".join([*found, last])
    near = nearest(last, known, ALIKE)
    return near if found == sections else ".".join([*found, *([] if near is None else [near])])
