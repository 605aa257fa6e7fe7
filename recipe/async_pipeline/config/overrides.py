# SPDX-License-Identifier: Apache-2.0
"""Overrides of hydra: which keys they set, how a value is written, and complaints about them in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .misplaced import unknown_key
from .paths import OWN

EXAMPLE = f"'+{OWN}.custom_stages=[\"my_module:Class@reward->train\"]'"
_NO_SUCH_KEY = re.compile(r"^Could not override '(.+?)'")
_PRESENT = re.compile(r"^Could not append to config\. An item is already at '(.+?)'")
_UNREADABLE = re.compile(
    r"^(?:LexerNoViableAltException: (?P<override>.+)"
    r"|(?P<reason>(?:no viable alternative at|mismatched|extraneous) input .+|token recognition error.+))$"
)


def sets(overrides: Iterable[str], path: str) -> bool:
    """Return whether the command line sets a key."""
    return any(override.partition("=")[0].lstrip("+") == path for override in overrides)


def explain_complaint(complaint: str, near: Callable[[str], str | None] = lambda path: None) -> str | None:
    """Return one line for the first line of a complaint of hydra, or None if it is about something else.

    `near` returns the key of verl's of which a path is a misspelling, or None.
    """
    if found := _NO_SUCH_KEY.match(complaint):
        return unknown_key(found[1], near(found[1]))
    if found := _PRESENT.match(complaint):
        return f"+{found[1]} must not have a +, because this config has the key; write {found[1]}=..."
    if found := _UNREADABLE.match(complaint):
        what = found["override"] or "an override"
        why = f" ({found['reason']})" if found["reason"] else ""
        return (
            f"{what} cannot be parsed{why}; put values with special characters into double quotes, and the "
            f"override into single ones, e.g. {EXAMPLE}"
        )
    return None


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
