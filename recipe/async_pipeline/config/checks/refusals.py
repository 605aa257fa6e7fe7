# SPDX-License-Identifier: Apache-2.0
"""Refuse values of keys by tables of rows: a condition, the key, the values it may have, rule and remedy.

A row reads `path rule, got value; remedy`. In its rule and remedy `<some.key>` stands for the value of that
key. A path that begins with a dot is below the section that the check is for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ...errors import ConfigError
from ..knobs.schema import AsyncPipelineConfig
from ..paths import OWN, select

UNREADABLE = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""What a check may raise on a value that an earlier one has refused."""
_PLACEHOLDER = re.compile(r"<([\w.]+)>")


class Settings:
    """A verl config, and the knobs that were read from it, looked up by paths."""

    def __init__(
        self, config: Mapping[str, Any], knobs: AsyncPipelineConfig | None = None, section: str = ""
    ) -> None:
        """`section`: where paths begin that start with a dot."""
        self.config = config
        self._knobs, self._section = knobs, section

    def __getitem__(self, path: str) -> Any:
        """Return the value of a key, or None if the config does not have it."""
        path = self.absolute(path)
        if self._knobs is not None and path.startswith(f"{OWN}."):
            return attrgetter(path.removeprefix(f"{OWN}."))(self._knobs)
        return select(self.config, path)

    def absolute(self, path: str) -> str:
        """Return the whole path of a key."""
        return f"{self._section}{path}" if path.startswith(".") else path

    def fill(self, text: str) -> str:
        """Replace each `<key>` by its value."""
        return _PLACEHOLDER.sub(lambda match: str(self[match[1]]), text)


class Refusal(NamedTuple):
    """A row."""

    path: str
    allowed: Callable[[Any], bool]
    """Whether the key may have a value."""
    rule: str
    """Begins with `must` or `requires`."""
    remedy: str
    when: Callable[[Settings], Any] = lambda at: True
    """Whether the row applies."""


ALWAYS: Callable[[Settings], Any] = Refusal._field_defaults["when"]


def must_be(path: str, *values: Any, remedy: str, where: str = "") -> Refusal:
    """Return a row for a key that must have one of some values; the first one is named."""
    return Refusal(path, any_of(*values), f"must be {values[0]}{where and f' {where}'}", remedy)


def must_be_one_of(path: str, values: Sequence[Any], remedy: str) -> Refusal:
    """Return a row for a key that must have one of some values; all are named."""
    return Refusal(path, any_of(*values), f"must be one of {', '.join(map(str, values))}", remedy)


def must_be_off(path: str, remedy: str, where: str = "", when: Callable[[Settings], Any] = ALWAYS) -> Refusal:
    """Return a row for a switch that must be off."""
    return Refusal(path, off, f"must be False{where and f' {where}'}", remedy, when)


def must_be_on(path: str, remedy: str, where: str = "", when: Callable[[Settings], Any] = ALWAYS) -> Refusal:
    """Return a row for a switch that must be on."""
    return Refusal(path, on, f"must be True{where and f' {where}'}", remedy, when)


def must_be_positive(path: str, remedy: str) -> Refusal:
    """Return a row for a whole number >= 1."""
    return Refusal(path, positive, "must be >= 1", remedy)


def refuse(rows: Iterable[Refusal], at: Settings) -> None:
    """Raises ConfigError with a line for each key that has another value, from its first row that applies.

    A row that cannot read a value hides no other row; its error is raised if none refuses a value.
    """
    found: dict[str, str] = {}
    unreadable: Exception | None = None
    for row in rows:
        path, value = at.absolute(row.path), at[row.path]
        try:
            if path not in found and not row.allowed(value) and row.when(at):
                found[path] = f"{path} {at.fill(row.rule)}, got {value!r}; {at.fill(row.remedy)}"
        except UNREADABLE as error:
            unreadable = error
    if found:
        raise ConfigError(*found.values())
    if unreadable is not None:
        raise unreadable


def check_all(*checks: Callable[[], object]) -> None:
    """Call checks. Raises ConfigError with the problems of all that raise one."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
        except UNREADABLE:
            if not problems:
                raise
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


# Values that keys may have.


def any_of(*values: Any) -> Callable[[Any], bool]:
    """Return a test whether a value is one of these."""
    return lambda value: value in values


def other_than(*values: Any) -> Callable[[Any], bool]:
    """Return a test whether a value is none of these."""
    return lambda value: value not in values


def never(value: Any) -> bool:
    """Refuse every value where the row applies."""
    return False


def off(value: Any) -> bool:
    """Return whether a switch is off, or a section absent."""
    return not value


def on(value: Any) -> bool:
    """Return whether a switch is on, or a value given."""
    return bool(value)


def whole(value: Any) -> bool:
    """Return whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive(value: Any) -> bool:
    """Return whether a value is a whole number >= 1."""
    return whole(value) and value >= 1


def whole_or_none(value: Any) -> bool:
    """Return whether a value is a whole number >= 0 or absent."""
    return value is None or (whole(value) and value >= 0)


def share(value: Any) -> bool:
    """Return whether a value is a number above 0 and at most 1, or absent."""
    return value is None or (number_above(0)(value) and value <= 1)


def number(value: Any) -> bool:
    """Return whether a value is a finite number, or absent."""
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )


def number_above(least: float) -> Callable[[Any], bool]:
    """Return a test whether a value is a finite number above a bound, or absent."""
    return lambda value: number(value) and (value is None or value > least)


def number_from(least: float) -> Callable[[Any], bool]:
    """Return a test whether a value is a finite number that is not below a bound, or absent."""
    return lambda value: number(value) and (value is None or value >= least)
