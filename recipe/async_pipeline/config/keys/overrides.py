# SPDX-License-Identifier: Apache-2.0
"""Overrides of hydra: which keys they set, how a value is written, and complaints about them in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..paths import OWN
from .misplaced import unknown_key

EXAMPLE = f"'+{OWN}.custom_stages=[\"my_module:Class@reward->train\"]'"
_NO_SUCH_KEY = re.compile(r"^Could not override '(.+?)'")
_PRESENT = re.compile(r"^Could not append to config\. An item is already at '(.+?)'")
_NO_OPTION = re.compile(
    r"^(?:In '.+?': )?Could not find '(?P<group>[^/']+)/(?P<name>[^']+)'\s+Available options .+?:"
    r"(?P<options>(?:\n\t.+)+)"
)
_NO_FILE = re.compile(r"^Cannot find primary config '(.+?)'")
_AMBIGUOUS = re.compile(r"^Ambiguous value for argument '(.+?)=(.+)'")
_UNREADABLE = re.compile(
    r"^(?:LexerNoViableAltException: (?P<override>.+)"
    r"|(?P<reason>(?:no viable alternative at|mismatched|extraneous) input .+|token recognition error.+))$"
)
_FULL_ERROR = re.compile(r"^hydra\.errors\.\w+: ")
"""Before a complaint in a traceback, which hydra prints if HYDRA_FULL_ERROR=1."""
_PARTS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[\]{},]|[^\[\]{},'"]+""")
"""Quoted texts, brackets and commas, and what is between them."""


class Modernised(NamedTuple):
    """A command line as this verl understands it."""

    words: list[str]
    notes: tuple[str, ...]
    """One line for each word that changed."""
    problems: tuple[str, ...]
    """One line for each old key whose value is not the one of the present key; the words lack the old key."""


def sets(overrides: Iterable[str], path: str) -> bool:
    """Return whether the command line sets a key."""
    return any(override.partition("=")[0].lstrip("+") == path for override in overrides)


def unknown_in(complaint: str) -> str | None:
    """Return the key of which hydra complains that the config does not have it, or None."""
    found = _NO_SUCH_KEY.match(complaint)
    return found[1] if found else None


def is_refused(word: str, complaint: str) -> bool:
    """Return whether hydra complains of the key of a word, or of the file that it chooses."""
    key, _, name = word.partition("=")
    if (path := unknown_in(complaint)) is not None:
        return key == path
    found = _NO_OPTION.match(complaint)
    return found is not None and (key.partition("@")[0].lstrip("+"), name) == (found["group"], found["name"])


def unknown_among(overrides: Iterable[str], has: Callable[[str], bool]) -> dict[str, str]:
    """Return the words whose key neither the config nor an earlier `+` has, with the keys."""
    found, added = {}, set[str]()
    for word in overrides:
        key, equals, _ = word.partition("=")
        path = key.lstrip("+~")
        parts = path.split(".")
        above = {".".join(parts[:size]) for size in range(1, len(parts) + 1)}
        if key.startswith("+"):
            added |= above
        elif (
            equals
            and "." in key
            and not key.startswith(("~", "hydra."))
            and "@" not in key
            and "/" not in key
        ):
            if path not in added and not has(path):
                found[word] = path
    return found


def several_values(key: str, value: str) -> str:
    """Return the line on a key with several values, which only a sweep of hydra may have."""
    return f"{key} must be one value, got {value}; write '{key}=[{value}]' for a list"


def explain_complaint(
    complaint: str, near: Callable[[str], str | None] = lambda path: None, word: str = "an override"
) -> str | None:
    """Return one line for a complaint of hydra, or None if it is about something else.

    `near` returns the key of verl's of which a path is a misspelling, or None. `word`: what hydra read.
    """
    complaint = _FULL_ERROR.sub("", complaint)
    if found := _NO_SUCH_KEY.match(complaint):
        return unknown_key(found[1], near(found[1]))
    if found := _PRESENT.match(complaint):
        return f"+{found[1]} must not have a +, because this config has the key; write {found[1]}=..."
    if found := _NO_OPTION.match(complaint):
        options = ", ".join(found["options"].split())
        return (
            f"{found['group']} must be one of {options}, got {found['name']!r}; choose one of verl's, and "
            f"its keys in place of keys of {found['name']}"
        )
    if found := _NO_FILE.match(complaint):
        return f"{found[1]} is not one of verl's configurations; give its folder by --config-path=/..."
    if found := _AMBIGUOUS.match(complaint):
        return several_values(found[1], found[2])
    if found := _UNREADABLE.match(complaint.split("\n")[0]):
        what = found["override"] or word
        if not what.isascii() and quote_names(what) == what:
            return f"{what} cannot be parsed, because it has keys that are not ASCII; set it in a file"
        why = f" ({found['reason']})" if found["reason"] else ""
        return (
            f"{what} cannot be parsed{why}; put values with special characters into double quotes, and the "
            f"override into single ones, e.g. {EXAMPLE}"
        )
    return None


def quote_names(override: str) -> str:
    """Return an override with quotes around the texts that are not ASCII, which hydra's grammar requires.

    Keys cannot have quotes, so those remain.
    """
    key, equals, value = override.partition("=")
    if value.isascii() or value[:1] in ("'", '"'):
        return override
    if value[:1] not in ("[", "{"):
        return f"{key}{equals}{hydra_value(value)}"

    quoted, inside = [], list[str]()
    for part in _PARTS.findall(value):
        if part in ("[", "{"):
            inside.append(part)
        elif part in ("]", "}") and inside:
            inside.pop()
        elif not part.isascii() and part[0] not in ("'", '"'):
            name, colon, text = part.partition(":") if inside[-1:] == ["{"] else ("", "", part)
            part = f"{name}{colon}{text if text.isascii() else hydra_value(text.strip())}"
        quoted.append(part)
    return f"{key}{equals}{''.join(quoted)}"


def hydra_value(value: Any) -> str:
    """Return a value in hydra's grammar, which is close to JSON but has unquoted keys."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    # Within quotes, hydra treats a backslash as an escape only before a quote.
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"
