# SPDX-License-Identifier: Apache-2.0
"""Knobs as typed fields of nested dataclasses: list them, check their values, build them from plain values.

Only a field's annotation says what it accepts:

    max_lag: Annotated[int, Bounds(least=0)] = 1        a number within bounds
    straggler: Literal["wait", "drop"] = "wait"         one of these words (or truth values)
    depth: int | None = None                            None: derived from other knobs
    staleness: StalenessConfig = StalenessConfig()      a section with its own knobs

A knob belongs to the identity of a run, which a resume keeps, unless `MAY_CHANGE` of its class names it or
its section: it changes neither what is trained nor what a checkpoint holds, or the run may have ended for it.

Error messages have one line: path, rule, value, remedy.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

from ...errors import ConfigError
from ...redaction import shown
from ..paths import OWN, walk

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The range of a number, and the remedy for a value outside it."""

    least: float | None = None
    above: float | None = None
    """Exclusive, unlike `least`."""
    most: float | None = None
    remedy: str = "leave it out for the default"

    def holds(self, value: float) -> bool:
        """Return whether a value is within the bounds."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        parts = (("> {:.10g}", self.above), (">= {:.10g}", self.least), ("at most {:.10g}", self.most))
        return " and ".join(form.format(bound) for form, bound in parts if bound is not None)


LONGEST_S = 1e9
"""The longest time that timers accept."""
Positive = Annotated[int, Bounds(least=1)]
Limit = Annotated[int, Bounds(least=1, most=LONGEST_S)]
Seconds = Annotated[float, Bounds(above=0, most=LONGEST_S)]


class Knob(NamedTuple):
    """One field that the user may set."""

    path: str
    """Path below the root, e.g. `staleness.max_lag`."""
    kind: Any
    """The annotation without `Annotated` and `None`."""
    bounds: Bounds | None
    default: Any
    section: type
    """The dataclass that has the field."""
    may_change: bool = False
    """Whether a resumed run may have another value."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def choices(self) -> tuple[str | bool, ...]:
        """Words that the knob accepts, or nothing if it accepts other values."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    def check(self, value: Any, path: str) -> None:
        """Raises ConfigError if the value has the wrong type or is outside the bounds."""
        rule = self._violated(value)
        if rule is not None:
            remedy = self.bounds.remedy if self.bounds else self._remedy()
            written = list(value) if isinstance(value, tuple) else value
            got = "null" if written is None else repr(written)
            raise ConfigError(f"{path} must be {rule}, got {got}; {remedy}")

    def _violated(self, value: Any) -> str | None:
        if self.choices:
            is_choice = any(type(value) is type(one) and value == one for one in self.choices)
            return None if is_choice else f"one of {', '.join(str(one) for one in self.choices)}"

        if self.kind is bool:
            return None if isinstance(value, bool) else "True or False"
        if self.kind is str:
            return None if isinstance(value, str) else "text"
        if self.kind in (int, float):
            numbers = int if self.kind is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, numbers):
                return "a whole number" if self.kind is int else "a number"
            return str(self.bounds) if self.bounds and not self.bounds.holds(value) else None

        if typing.get_origin(self.kind) is tuple:
            texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
            return None if texts else "a list of texts"
        is_mapping = typing.get_origin(self.kind) is Mapping
        return "a mapping" if is_mapping and not isinstance(value, Mapping) else None

    def _remedy(self) -> str:
        return f"{self.choices[0]} is the default" if self.choices else "leave it out for the default"


def knobs_of(root: type) -> tuple[Knob, ...]:
    """Return every knob of a dataclass and of its sections, in the order of their fields."""
    return _all_knobs(root)


@functools.cache  # reading the annotations takes longer than all the checks of a config
def _all_knobs(root: type) -> tuple[Knob, ...]:
    return tuple(_knobs(root, "", free=False))


def sections_of(root: type) -> Mapping[str, type]:
    """Return every section below a dataclass by its path, outer ones first."""
    found: dict[str, type] = {}
    for name, kind in _kinds(root).items():
        if dataclasses.is_dataclass(kind):
            inner = typing.cast("type", kind)
            found |= {name: inner} | {f"{name}.{path}": cls for path, cls in sections_of(inner).items()}
    return found


def build(root: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass from the values of its knobs, by their paths. Raises ConfigError if one is wrong.

    A knob that is None or missing keeps its default.
    """
    arguments: dict[str, Any] = {}
    for name, kind in _kinds(root).items():
        if dataclasses.is_dataclass(kind):
            inner = {path[len(name) + 1 :]: v for path, v in values.items() if path.startswith(f"{name}.")}
            arguments[name] = build(typing.cast("type", kind), inner)
        elif values.get(name) is not None:
            value = values[name]
            # The check refuses other types.
            is_list = typing.get_origin(kind) is tuple and isinstance(value, list)
            arguments[name] = tuple(value) if is_list else value
    return root(**arguments)


def check_fields(section: Any, path: str) -> None:
    """Check every knob of a section against its annotation. Raises ConfigError if one is wrong."""
    for knob in knobs_of(type(section)):
        value = section
        for part in knob.path.split("."):
            value = getattr(value, part)
        if value is not None or knob.default is not None:
            knob.check(value, f"{path}.{knob.path}")


def _knobs(cls: type, prefix: str, *, free: bool) -> Iterator[Knob]:
    """Yield the knobs of a section; `free`: all of them may change when a run is resumed."""
    hints, kinds = typing.get_type_hints(cls, include_extras=True), _kinds(cls)
    for item in dataclasses.fields(cls):
        kind = kinds[item.name]
        may_change = free or item.name in getattr(cls, "MAY_CHANGE", ())
        if dataclasses.is_dataclass(kind):
            yield from _knobs(typing.cast("type", kind), f"{prefix}{item.name}.", free=may_change)
        else:
            bounds = next((part for part in _parts(hints[item.name]) if isinstance(part, Bounds)), None)
            yield Knob(f"{prefix}{item.name}", kind, bounds, item.default, cls, may_change)


def _kinds(cls: type) -> Mapping[str, Any]:
    """Return the annotation of each field without `Annotated` and `None`."""
    return _read_kinds(cls)


@functools.cache
def _read_kinds(cls: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: _without_none(hints[item.name]) for item in dataclasses.fields(cls)}


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (Union, types.UnionType):
        return hint
    (kind,) = (part for part in typing.get_args(hint) if part is not type(None))
    return kind


def _parts(hint: Any) -> Sequence[Any]:
    """Return the metadata of a hint, also if the hint may be None."""
    if typing.get_origin(hint) is Annotated:
        return typing.get_args(hint)
    return [part for inner in typing.get_args(hint) for part in _parts(inner)]


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
