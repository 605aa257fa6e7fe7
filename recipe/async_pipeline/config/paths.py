# SPDX-License-Identifier: Apache-2.0
"""Dotted paths in a config: look one up, walk all of them, suggest the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any


def select(raw: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    node: Any = raw
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def walk(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted paths of a nested mapping, inner nodes included."""
    for name, value in raw.items():
        path = f"{prefix}{name}"
        yield path, value
        if isinstance(value, Mapping):
            yield from walk(value, f"{path}.")


def hint(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
