# SPDX-License-Identifier: Apache-2.0
"""Names of knobs as users write them: flatten sections to paths, refuse unknown names."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from ..agents.environment import BUILT_IN
from ..core.bad_data import NO_SCORE
from ..errors import ConfigError
from ..redaction import shown
from .environment_arguments import built_in_arguments
from .fields import knobs_of, sections_of
from .paths import OWN, walk

ALIKE = 0.75
"""Smallest similarity of a misspelled key of verl's and the one that is meant."""


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
    """Return the message for a path below our section that is not a knob, with a near path."""
    if path == f"faults.bad_data.{NO_SCORE}":
        return f"{OWN}.{path} is unknown{got}; set {OWN}.reward.failure for responses without a score"
    paths = [knob.path for knob in knobs_of(root)]
    near = _in_mapping(root, path) or _nearest(path, paths)
    if near:
        return f"{OWN}.{path} is unknown{got} (did you mean {near!r}?)"
    close = ", ".join(_resembling(path, paths))
    return f"{OWN}.{path} is unknown{got}; nearest knobs: {close}; `async-pipeline explain --knobs` lists all"


def mapping_knobs(root: type) -> list[str]:
    """Return the paths of the knobs that hold names of the user's, such as arguments."""
    return [knob.path for knob in knobs_of(root) if typing.get_origin(knob.kind) is Mapping]


def _in_mapping(root: type, path: str) -> str | None:
    """Return the place of a name that belongs into a knob with names of the user's, or None.

    The section that it is in is misspelled, or it is an argument of an environment of this package.
    """
    parent, _, name = path.rpartition(".")
    knobs, mappings = knobs_of(root), {one.rpartition(".")[2]: one for one in mapping_knobs(root)}
    section = parent.rpartition(".")[2]
    close = get_close_matches(section, mappings, n=1, cutoff=0.7)
    if section and section not in sections_of(root):
        close += [one for one in mappings if one.endswith(f"_{section}")]
    if close:
        return f"{mappings[close[0]]}.{name}"
    arguments = {one for known in BUILT_IN for one in built_in_arguments(known)}
    of_environments = mappings.get("environment_kwargs")
    if of_environments is None or name not in arguments or name in {knob.name for knob in knobs}:
        return None
    return f"{of_environments}.{name}"


def _resembling(path: str, paths: list[str]) -> list[str]:
    """Return the three paths that resemble a path most, in the last part or as a whole."""
    name = path.rpartition(".")[2]

    def ratio(known: str) -> float:
        last = known.rpartition(".")[2]
        return max(SequenceMatcher(None, *pair).ratio() for pair in ((path, known), (name, last)))

    return sorted(paths, key=ratio, reverse=True)[:3]


def _nearest(path: str, paths: list[str]) -> str | None:
    """Return the knob that a path resembles, in its last part or as a whole, or None."""
    by_name = {known.rpartition(".")[2]: known for known in reversed(paths)}
    name = path.rpartition(".")[2]
    same = [known for known in paths if known.rpartition(".")[2] == name]
    if same:
        return max(same, key=lambda known: SequenceMatcher(None, path, known).ratio())
    words = set(name.split("_"))
    holding = [known for known in paths if len(words) > 1 and words <= set(re.split("[._]", known))]
    if holding:
        return min(holding, key=len)
    near = get_close_matches(path, paths, n=1, cutoff=0.8)
    if near:
        return near[0]
    close = get_close_matches(name, list(by_name), n=1)
    return by_name[close[0]] if close else None
