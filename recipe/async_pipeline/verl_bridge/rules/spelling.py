# SPDX-License-Identifier: Apache-2.0
"""Refuse misplaced and misspelled keys in verl's own sections, which hydra adds with a `+` and no code reads.

verl reads some keys that its configuration does not have, and so may the user's own code. A key that the
section does not have is refused if it has the name of a knob, or if it resembles a key of its section and
its name occurs nowhere in verl's source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from ...config.checks.refusals import check_all
from ...config.checks.rollout_correction import POLICY_LOSS
from ...config.keys.misplaced import ALIKE, reject_in_place
from ...config.keys.without_effect import why_without_effect
from ...config.paths import nearest, select, walk
from ...errors import ConfigError
from ...installed.verl import has
from ...redaction import shown
from ..launch.light_verl import TARGET, fields_of
from .verl_keys import is_read, is_read_in, verl_trees

PLAIN = ("trainer",)
"""Sections without a dataclass, of which verl's configuration has all keys."""
OLDER = "reward_model"
"""A section of older configurations, of which `older_verl` has every key that is still read somewhere."""
MADE = ("actor_rollout_ref", "algorithm", "critic")
"""Sections that verl makes objects of, with those below them."""
READ_BY_NAME = ("", "actor_rollout_ref", "data", *PLAIN)
"""Sections without a dataclass that verl passes to nothing as a whole."""
TOOLS = Path(__file__).parents[2] / "tools"
"""It names keys of other systems, which no run reads."""
CHECKED_ELSEWHERE = (POLICY_LOSS,)
"""Sections that have keys of this package too."""


def check_spelling(config: DictConfig) -> None:
    """Raises ConfigError if a key in a section of verl is misspelled, or has the name of a knob."""
    tree = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    check_all(
        *(
            partial(_check_key, path, str(name), section[name], known, tree)
            for path, section in _sections(tree, "")
            if (known := _known(path, section))
            for name in section
            if name not in known
        ),
        *(partial(_check_top, path, value) for path, value in walk(tree) if not isinstance(value, Mapping)),
    )


def _check_key(path: str, name: str, value: Any, known: frozenset[str], tree: dict[str, Any]) -> None:
    key = f"{path}.{name}"
    reject_in_place(key, value, tree)
    has_all = path in PLAIN or TARGET in (select(tree, path) or {})
    if has_all and (near := near_key(name, known)) is not None:
        raise ConfigError(f"{key} is unknown, got {shown(key, value)}; did you mean {near!r}?")
    if TARGET in (select(tree, path) or {}) and path.partition(".")[0] in MADE:
        raise ConfigError(
            f"{key} is unknown, got {shown(key, value)}, and the class of its section has no such field; "
            "leave it out"
        )


def _check_top(path: str, value: Any) -> None:
    """Raises ConfigError if a key lacks the name of the section that its own section is in."""
    top, _, name = path.partition(".")
    for place in _inner(top) if name else ():
        if any(has(tree, f"{place}.{name}") for tree in verl_trees().values()):
            key = f"{place}.{name}"
            raise ConfigError(f"{path} is unknown, got {shown(key, value)}; did you mean {key!r}?")


def near_key(name: str, known: frozenset[str]) -> str | None:
    """Return the known key of which a name is a misspelling, or None if verl may read the name itself."""
    near = nearest(name, known, ALIKE)
    return None if near is None or is_read(name) else near


def _sections(tree: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the sections that have a class or keys by default, outer ones first."""
    verls = TARGET in tree or any(select(composed, path) for composed in verl_trees().values() if path)
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
        fields = fields_of(str(section[TARGET]))
        if not fields:
            return frozenset()
        known.update(fields)
    for composed in verl_trees().values():
        there = select(composed, path)
        known |= set(there) if isinstance(there, Mapping) else set()
    return frozenset(known)


def takes_no(path: str) -> bool:
    """Return whether a key is below a section of verl whose class would refuse it."""
    section, name = _added(path) or ("", "")
    classes = [_known(section, one) for one in _sections_at(section) if TARGET in one]
    return bool(classes) and all(known and name not in known for known in classes)


def without_unread(words: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return a command line on verl's configuration without keys that no code reads, and a note on each.

    These are added with a `+`, and the first new name in them occurs nowhere in the source of verl and of
    this package, nor in a value. From a section with a class they are removed, since the workers would refuse
    them. In others they remain, since code of the user may read them.
    """
    given = list(words)
    added = {word: found for word in given if word.startswith("+") and (found := _added(word))}
    read = _read({*added.values()}, given)
    rest, notes = [], []
    for word in given:
        section, name = added.get(word, ("", ""))
        there = _sections_at(section)
        has_class = section not in READ_BY_NAME and not _is_older(section)
        is_read_there = (section, name) in read and not _is_older(section)
        if name and (why := why_without_effect(_key(word))):
            rest.append(word)
            notes.append(f"ignored: {_key(word)}, because {why}")
        elif not name or (is_read_there and (section or not _inner(name))):
            rest.append(word)
        elif (has_class or section in PLAIN) and any(near_key(name, _known(section, one)) for one in there):
            rest.append(word)  # `check_spelling` refuses it
        else:
            rest += [] if has_class else [word]
            unless = "" if has_class else ", unless yours does"
            notes.append(f"ignored: {_key(word)}, because no code of verl reads it{unless}")
    return rest, tuple(notes)


def _is_older(section: str) -> bool:
    return section.partition(".")[0] == OLDER


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _read(keys: Collection[tuple[str, str]], words: Iterable[str]) -> set[tuple[str, str]]:
    """Return the keys, sections and names, that verl's source, this package's or an interpolation has."""
    unread = {key for key in keys if not is_read_in(*key)}
    if not unread:
        return set(keys)
    texts = [word.partition("=")[2] for word in words if "${" in word]
    package = Path(__file__).parents[2]
    files = (file for file in package.rglob("*.py") if TOOLS not in file.parents)
    own = [file.read_text(encoding="utf-8") for file in files]
    return {
        (section, name)
        for section, name in keys
        if (section, name) not in unread
        or any(name in text for text in texts)
        or any(_in_text(section, name) in text for text in own)
    }


def _in_text(section: str, name: str) -> str:
    """Return how this package's source names a key of a section."""
    if not section:
        return f'"{name}"'
    return f"{section}.{name}" if section in READ_BY_NAME else name


def _added(word: str) -> tuple[str, str] | None:
    """Return the section of verl that a word adds to, and the first new name.

    Returns None if the section has the key, or if verl may pass it to other code as a whole.
    """
    section = ""
    for name in _key(word).split("."):
        there = _sections_at(section)
        if not any(name in one for one in there):
            has_class = any(TARGET in one for one in there)
            named = has_class or section in READ_BY_NAME or _is_older(section)
            return (section, name) if named else None
        section = f"{section}.{name}".lstrip(".")
    return None


@cache
def _inner(name: str) -> list[str]:
    """Return verl's sections with a name that no section at its top has, two levels below it."""
    tops = {f"{top}.{name}" for tree in verl_trees().values() for top in tree if has(tree, f"{top}.{name}")}
    return [] if _sections_at(name) else sorted(tops)


def _sections_at(path: str) -> list[Mapping[str, Any]]:
    """Return a section of each of verl's configurations that has it."""
    found = [select(tree, path) if path else tree for tree in verl_trees().values()]
    return [one for one in found if isinstance(one, Mapping)]
