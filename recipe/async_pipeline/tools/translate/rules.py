# SPDX-License-Identifier: Apache-2.0
"""The walk over a file of another system, and values that files have.

Pure: takes plain mappings. A table has a rule of `config.foreign_keys` for each key; `*` in its path stands
for any name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ...config.foreign_keys import Document, Draft, Outcome, Rule
from ...config.paths import select
from ...errors import ConfigError

AS_IT_IS = Outcome("set", text="verl's own key")
"""The key is verl's, or one that is translated when a run starts."""
Table = Sequence[tuple[str, Rule]]


ADDED = ("async_training.",)
"""Keys that stay as they are, but that verl's config does not have."""


class Became(NamedTuple):
    """What became of one key of a file."""

    key: str
    value: Any
    outcome: Outcome


@dataclass(frozen=True)
class TranslatedFile:
    """A translated file."""

    keys: tuple[Became, ...]
    """Each key with a value, in the order of the file."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """All values to set, by path."""

    missing: tuple[str, ...] = ()
    """What a run needs and the file does not have."""

    @property
    def unknown(self) -> list[str]:
        """Keys of which nothing is known."""
        return [one.key for one in self.keys if one.outcome.kind == "unknown"]


def translate(document: Document, table: Table, *, also: Mapping[str, Any] | None = None) -> TranslatedFile:
    """Translate every key of a document. `also`: overrides of every file of that system.

    Raises ConfigError if a value is wrong, or if two keys ask for different values.
    """
    draft = Draft(dict(also or {}), dict.fromkeys(also or {}, "the translation"))
    keys = []
    for key, value in leaves(document):
        rule = next((rule for pattern, rule in table if fnmatchcase(key, pattern)), None)
        outcome = Outcome("unknown", text="nothing is known of it") if rule is None else rule(value, document)
        if outcome is AS_IT_IS:
            outcome = Outcome("set", {f"+{key}" if key.startswith(ADDED) else key: value})
        keys.append(Became(key, value, outcome))
        for path, wanted in outcome.overrides.items():
            draft.propose(path, wanted, key)
    return TranslatedFile(tuple(keys), draft.values)


def leaves(document: Document, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted paths and values of everything that is no section."""
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# Rules.


def as_it_is(value: Any, document: Document) -> Outcome:
    """Keep the key."""
    return AS_IT_IS


# Values.


def whole(document: Document, path: str, default: int | None = None) -> int:
    """Return a whole number >= 1 of a document. Raises ConfigError if it is none, or missing."""
    value = select(document, path)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path} must be a whole number >= 1, got {value!r}; correct the file")
    return value


def quotient(document: Document, path: str, divisor: int, of: str) -> int:
    """Return the number at a path divided by a number that it must be a multiple of."""
    value = whole(document, path)
    if value % divisor:
        raise ConfigError(f"{path} must be a multiple of {of}, {divisor}, got {value}; change one of them")
    return value // divisor


RANGE = re.compile(r"\s*list\(\s*range\(\s*(\d+)\s*,\s*(\d+)\s*\)\s*\)\s*")
NODE_DEVICES = 8
"""Devices of a node, from which the number of nodes follows."""


def devices(value: Any, path: str) -> tuple[int, int]:
    """Return nodes and devices per node of a mapping such as `list(range(0,16))`.

    Raises ConfigError if it is neither that nor a list, or does not fill its nodes.
    """
    found = RANGE.fullmatch(value) if isinstance(value, str) else None
    count = int(found[2]) - int(found[1]) if found else len(value) if isinstance(value, list) else 0
    if count < 1:
        raise ConfigError(f"{path} must be list(range(FIRST,END)) or a list of devices, got {value!r}")
    if count <= NODE_DEVICES:
        return 1, count
    if count % NODE_DEVICES:
        raise ConfigError(
            f"{path} must fill nodes of {NODE_DEVICES} devices, got {count} devices; set trainer.nnodes and "
            "trainer.n_gpus_per_node by hand"
        )
    return count // NODE_DEVICES, NODE_DEVICES
