# SPDX-License-Identifier: Apache-2.0
"""What a key of another system can become: the rules of `aliases.FOREIGN` and of `tools.translate`.

A rule gets the value of a key and the whole document that has it: the configuration of a run, or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...errors import ConfigError

Kind = Literal["set", "nothing to do", "differs", "by hand", "unsupported", "unknown"]
"""What became of a key: overrides; nothing, because it is so anyway; overrides or nothing, with a difference
that matters; something that the user has to do; nothing, because the value is wrong or this package cannot do
it; or nothing is known of it.
"""
Document = Mapping[str, Any]


class Outcome(NamedTuple):
    """What a rule says about a key."""

    kind: Kind
    overrides: Mapping[str, Any] = {}
    """Values by path. In a file's outcome, a path with a leading + is not in verl's config. In the outcome of
    a key of a run, a knob has its path below our section, and a name without a dot that is no knob, such as
    `require_batches`, is combined with other keys later."""
    text: str = ""
    """What the user should know."""

    def describe(self) -> str:
        """Return the outcome as text."""
        return self.text or ", ".join(f"{path}={value}" for path, value in self.overrides.items())


Rule = Callable[[Any, Document], Outcome]


class WrongValue(Exception):
    """A rule refuses the value of its key, as `must be ..., got ...; remedy`."""


class Takes(NamedTuple):
    """The values that a key may have."""

    holds: Callable[[Any], bool]
    rule: str
    remedy: str

    def check(self, value: Any) -> None:
        """Raises WrongValue if the key may not have the value."""
        if not self.holds(value):
            raise WrongValue(f"must be {self.rule}, got {value!r}; {self.remedy}")


@dataclass(frozen=True)
class ForeignKey:
    """A key of another system that a run understands."""

    path: str
    """Its place in the config."""
    rule: Rule
    sets: tuple[str, ...] = ()
    """Paths of the knobs that it may set."""
    meaning: str = ""
    """For the reference, in Markdown; empty if an earlier entry of the table documents both."""
    unique: bool = True
    """Whether verl has no key of this name, so that the name in another place is a mistake."""

    def apply(self, value: Any, document: Document) -> Outcome:
        """Return what becomes of a value. Raises ConfigError if it is wrong."""
        try:
            return self.rule(value, document)
        except WrongValue as error:
            raise ConfigError(f"{self.path} {error}") from None


@dataclass
class Draft:
    """Values proposed so far, by their paths, and the key that proposed each."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def propose(self, name: str, value: Any, source: str) -> None:
        """Record a value. Raises ConfigError if another key proposed a different one."""
        if name in self.values and self.values[name] != value:
            raise ConfigError(
                f"{source} asks for {name}={value} but {self.sources[name]} for {self.values[name]}; keep "
                "one of them"
            )
        self.values[name] = value
        self.sources.setdefault(name, source)


# Rules.


def to(
    *paths: str,
    as_: Callable[[Any], Any] = lambda value: value,
    takes: Takes | None = None,
    text: str = "",
) -> Rule:
    """Set these paths to the value, converted by `as_`."""

    def rule(value: Any, document: Document) -> Outcome:
        if takes is not None:
            takes.check(value)
        return Outcome("set", dict.fromkeys(paths, as_(value)), text)

    return rule


def nothing(text: str) -> Rule:
    """The key needs no counterpart."""
    return lambda value, document: Outcome("nothing to do", text=text)


def differs(text: str, **overrides: Any) -> Rule:
    """There is something similar, or nothing."""
    return lambda value, document: Outcome("differs", overrides, text)


def by_hand(text: str) -> Rule:
    """The user has to do something."""
    return lambda value, document: Outcome("by hand", text=text)


def unsupported(text: str) -> Rule:
    """This package cannot do it."""
    return lambda value, document: Outcome("unsupported", text=text)


def one_of(choices: Mapping[Any, Any], *paths: str, otherwise: str) -> Rule:
    """Set these paths to the counterpart of the value; for other values, say `otherwise`."""

    def rule(value: Any, document: Document) -> Outcome:
        if value in choices:
            return Outcome("set", dict.fromkeys(paths, choices[value]))
        return Outcome("by hand", text=otherwise)

    return rule


def only(expected: Any, text: str, otherwise: str) -> Rule:
    """The key is as it is here anyway if it has the expected value; for other values, say `otherwise`."""

    def rule(value: Any, document: Document) -> Outcome:
        same = value == expected
        return Outcome("nothing to do" if same else "differs", text=text if same else otherwise)

    return rule


def untruncated(path: str, *whole: Any) -> Rule:
    """Set a limit of sampling if it is one of `whole`, which cut nothing off; leave it out otherwise."""

    def rule(value: Any, document: Document) -> Outcome:
        if value in whole:
            return Outcome("set", {path: value})
        text = f"left at {whole[0]}, since log-probs of truncated sampling cannot be compared with a lag"
        return Outcome("differs", text=text)

    return rule


def required(expected: Any, remedy: str, text: str = "nothing: it is so") -> Rule:
    """The key must have the expected value, as everything here does."""

    def rule(value: Any, document: Document) -> Outcome:
        same = value == expected and isinstance(value, bool) == isinstance(expected, bool)
        Takes(lambda value: same, f"{expected!r} with this pipeline", remedy).check(value)
        return Outcome("nothing to do", text=text)

    return rule


def left_out(remedy: str) -> Rule:
    """The key has no meaning here."""
    return to(takes=Takes(lambda value: False, "left out with this pipeline", remedy))
