# SPDX-License-Identifier: Apache-2.0
"""Names of knobs as users write them: flatten sections to paths, refuse unknown names."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from ...errors import ConfigError
from ...redaction import shown
from ..paths import OWN, walk
from .fields import knobs_of, sections_of


def flattened(root: type, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values below `root` by the paths of their knobs.

    Raises ConfigError for an unknown name, or if a section is not a mapping.
    """
    return _flattened(root, own, "")


def _flattened(root: type, node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    known, sections = {knob.path for knob in knobs_of(root)}, sections_of(root)
    found: dict[str, Any] = {}

    for name, value in node.items():
        path = f"{prefix}{name}"
        if path in known:
            found[path] = value
        elif path not in sections:
            if isinstance(value, Mapping) and value:
                # The first knob of a section with a wrong name tells which section is meant.
                below, value = next((p, v) for p, v in walk(value) if not (isinstance(v, Mapping) and v))
                path = f"{path}.{below}"
            raise ConfigError(unknown(root, path, f", got {shown(path, value)}"))
        elif isinstance(value, Mapping):
            found |= _flattened(root, value, f"{path}.")
        elif value is not None:
            knobs = ", ".join(knob.name for knob in knobs_of(sections[path]))
            raise ConfigError(f"{OWN}.{path} must be a section, got {value!r}; set one of its knobs: {knobs}")
    return found


def unknown(root: type, path: str, got: str = "") -> str:
    """Return the message for a path below our section that is not a knob, with the nearest three."""
    nearest = ", ".join(_nearest(path, [knob.path for knob in knobs_of(root)]))
    return (
        f"{OWN}.{path} is unknown{got}; nearest knobs: {nearest}; `async-pipeline explain --knobs` lists all"
    )


def mapping_knobs(root: type) -> list[str]:
    """Return the paths of the knobs that hold names of the user's, such as arguments."""
    return [knob.path for knob in knobs_of(root) if typing.get_origin(knob.kind) is Mapping]


def _nearest(path: str, known: list[str]) -> list[str]:
    """Return the three paths that resemble a path most, in the last part or as a whole."""

    def likeness(other: str) -> tuple[float, float]:
        whole = SequenceMatcher(None, path, other).ratio()
        last = SequenceMatcher(None, path.rpartition(".")[2], other.rpartition(".")[2]).ratio()
        return max(whole, last), whole

    return sorted(known, key=likeness, reverse=True)[:3]
