# SPDX-License-Identifier: Apache-2.0
"""Refuse misplaced and misspelled keys in verl's own sections, which hydra adds with a `+` and no code reads.

verl reads some keys that its configuration does not have, and so may the user's own code. A key that the
section does not have is refused if it has the name of a knob, or if it resembles a key of its section and
its name occurs nowhere in verl's source.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf

from ..config.misplaced import ALIKE, reject_in_place
from ..config.paths import select
from ..config.rollout_correction import POLICY_LOSS
from ..errors import ConfigError
from ..redaction import shown

TARGET = "_target_"
PLAIN = ("trainer",)
"""Sections without a dataclass, of which verl's configuration has all keys."""
CHECKED_ELSEWHERE = (POLICY_LOSS,)
"""Sections that have keys of this package too."""
COMPOSED = ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml")


def check_spelling(config: DictConfig) -> None:
    """Raises ConfigError if a key in a section of verl is misspelled, or has the name of a knob."""
    tree = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    for path, section in _sections(tree, ""):
        known = _known(path, section)
        for name in section.keys() - known if known else ():
            key, value = f"{path}.{name}", section[name]
            reject_in_place(key, value, tree)
            near = near_key(str(name), known) if TARGET in section or path in PLAIN else None
            if near is not None:
                raise ConfigError(f"{key} is unknown, got {shown(key, value)}; did you mean {near!r}?")


def near_key(name: str, known: frozenset[str]) -> str | None:
    """Return the known key of which a name is a misspelling, or None if verl may read the name itself."""
    near = difflib.get_close_matches(name, sorted(known), 1, ALIKE)
    return near[0] if near and not _occurs_in_verl(name) else None


def _sections(tree: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the sections that have a class or keys by default, outer ones first."""
    verls = TARGET in tree or any(select(_composed(name), path) for name in COMPOSED if path)
    if verls and path not in CHECKED_ELSEWHERE:
        yield path, tree
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _sections(value, f"{path}.{name}".lstrip("."))


def _known(path: str, section: Mapping[Any, Any]) -> frozenset[str]:
    """Return the keys of a section, or nothing if its class has no fields.

    These are the fields of the class, and the keys that verl's configuration has there.
    """
    known = {TARGET}
    if TARGET in section:
        fields = _fields(str(section[TARGET]))
        if not fields:
            return frozenset()
        known |= fields
    for name in COMPOSED:
        there = select(_composed(name), path)
        known |= set(there) if isinstance(there, Mapping) else set()
    return frozenset(known)


@cache
def _fields(target: str) -> frozenset[str]:
    """Return the fields of a dataclass, or nothing if it cannot be imported or is none."""
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return frozenset()
    return (
        frozenset(field.name for field in dataclasses.fields(cls))
        if dataclasses.is_dataclass(cls)
        else frozenset()
    )


@cache
def _composed(name: str) -> Mapping[str, Any]:
    """Return one of verl's composed configurations."""
    # It is long, and the loader in Python takes half a second for it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, Any] = yaml.load((files("verl.trainer.config") / name).read_bytes(), Loader=loader)
    return found


@cache
def _occurs_in_verl(name: str) -> bool:
    """Return whether a name is a word in verl's source. Reads all of it."""
    word = re.compile(rf"\b{re.escape(name)}\b".encode())
    root = Path(str(files("verl")))
    return any(word.search(file.read_bytes()) for file in sorted(root.rglob("*.py")))
