# SPDX-License-Identifier: Apache-2.0
"""The walk over a file of another system, and values that files have.

Pure: takes plain mappings. A table has a rule of `config.keys.foreign_keys` for each key; `*` in its path
stands for any name.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ...config.keys.foreign_keys import Document, Draft, Kind, Outcome, Rule, WrongValue
from ...config.paths import select
from ...errors import ConfigError
from ...redaction import shown

AS_IT_IS = Outcome("set", text="verl's own key")
"""The key is verl's, or one that is translated when a run starts."""
UNKNOWN = Outcome("unknown", text="nothing is known of it")
VARIABLE = Outcome("nothing to do", text="a variable: its value is used where the file refers to it")
Table = Sequence[tuple[str, Rule]]


ADDED = ("async_training.",)
"""Keys that stay as they are, but that verl's config does not have."""
OPEN = "???"
"""A value that a file of hydra leaves to the command line."""


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
        return self._of_kind("unknown")

    @property
    def unsupported(self) -> list[str]:
        """Keys whose values are wrong, disagree with another key, or ask for what this package cannot do."""
        return self._of_kind("unsupported")

    def _of_kind(self, kind: Kind) -> list[str]:
        return [one.key for one in self.keys if one.outcome.kind == kind]


def translate(
    document: Document,
    table: Table,
    *,
    also: Mapping[str, Any] | None = None,
    left_out: Mapping[str, Outcome] | None = None,
    variables: Collection[str] = (),
) -> TranslatedFile:
    """Translate every key of a document.

    `also`: overrides of every file of that system. `left_out`: outcomes of whole sections, by their paths,
    whose keys have no rules. `variables`: paths that the file itself refers to, so that they may be any.
    """
    draft = Draft(dict(also or {}), dict.fromkeys(also or {}, "the translation"))
    keys = []
    for key, value in leaves(document):
        outcome = _of_section(key, left_out or {}) or _outcome(key, value, document, table, variables)
        keys.append(Became(key, value, _proposed(draft, key, outcome)))
    missing = (f"{key}: the file leaves it open" for key, value in leaves(document) if value == OPEN)
    return TranslatedFile(tuple(keys), draft.values, tuple(missing))


def _of_section(key: str, sections: Mapping[str, Outcome]) -> Outcome | None:
    return next((outcome for path, outcome in sections.items() if f"{key}.".startswith(f"{path}.")), None)


def _outcome(key: str, value: Any, document: Document, table: Table, variables: Collection[str]) -> Outcome:
    """Return what becomes of a key."""
    if value == OPEN:
        return Outcome("by hand", text="the file leaves it open: set it")
    rule = next((rule for pattern, rule in table if fnmatchcase(key, pattern)), None)
    if rule is None:
        return VARIABLE if _is_variable(key, table, variables) else UNKNOWN
    try:
        outcome = rule(value, document)
    except (ConfigError, WrongValue) as error:
        return Outcome("unsupported", text=str(error))
    except (TypeError, ValueError):  # a rule calculates with the value
        return Outcome("unsupported", text=f"{key} has another type, got {shown(key, value)}; correct it")
    if outcome is AS_IT_IS:
        return Outcome("set", {f"+{key}" if key.startswith(ADDED) else key: value})
    return outcome


def _is_variable(key: str, table: Table, variables: Collection[str]) -> bool:
    """Return whether a key is in no section of its system, but in one that the file refers to.

    One member of a section is enough: a file has choices, as `${environments.first}`.
    """
    top = key.partition(".")[0]
    return not any(pattern.partition(".")[0] == top for pattern, _ in table) and any(
        name.partition(".")[0] == top for name in variables
    )


def _proposed(draft: Draft, key: str, outcome: Outcome) -> Outcome:
    """Propose the overrides of an outcome. Returns it, or the reason if another key disagrees."""
    try:
        for path, wanted in outcome.overrides.items():
            draft.propose(path, wanted, key)
    except ConfigError as error:
        return Outcome("unsupported", text=str(error))
    return outcome


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


NODE_DEVICES = 8
"""Devices of a node, from which the number of nodes follows."""


def devices(value: Any, path: str, per_node: int = NODE_DEVICES) -> tuple[int, int]:
    """Return nodes and devices per node of a mapping such as `list(range(0,16))`.

    Devices that do not fill nodes are nodes of fewer devices, which share the machines. Raises ConfigError if
    the value is no mapping.
    """
    count = len(set(device_ids(value, path)))
    if count <= per_node:
        return 1, count
    return count // math.gcd(count, per_node), math.gcd(count, per_node)


def device_ids(value: Any, path: str) -> list[int]:
    """Return the devices of a list, or of an expression with list, range and +. Raises ConfigError."""
    try:
        found = _evaluated(ast.parse(value.strip(), mode="eval").body) if isinstance(value, str) else value
    except (SyntaxError, ValueError, TypeError):
        found = None
    if not isinstance(found, list) or not found or not all(type(one) is int for one in found):
        raise ConfigError(
            f"{path} must be list(range(FIRST,END)) or a list of devices, got {value!r}; correct the file"
        )
    return found


def _evaluated(node: ast.expr) -> Any:
    """Return the value of an expression. Raises ValueError or TypeError for anything else."""
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluated(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluated(left) + _evaluated(right)
        case ast.Call(func=ast.Name(id="list"), args=[only], keywords=[]):
            return _evaluated(only)
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]):
            return list(range(*map(_evaluated, args)))
    raise ValueError("no list of devices")


def by_hand(text: str) -> Rule:
    """The user has to do something."""
    return lambda value, document: Outcome("by hand", text=text)


def one_of(choices: Mapping[Any, Any], *paths: str, otherwise: str) -> Rule:
    """Set these paths to the counterpart of the value; for other values, say `otherwise`."""

    def rule(value: Any, document: Document) -> Outcome:
        if value in choices:
            return Outcome("set", dict.fromkeys(paths, choices[value]))
        return Outcome("by hand", text=otherwise)

    return rule


def untruncated(path: str, *whole: Any) -> Rule:
    """Set a limit of sampling if it is one of `whole`, which cut nothing off; leave it out otherwise."""

    def rule(value: Any, document: Document) -> Outcome:
        if value in whole:
            return Outcome("set", {path: value})
        text = f"left at {whole[0]}, since log-probs of truncated sampling cannot be compared with a lag"
        return Outcome("differs", text=text)

    return rule
