# SPDX-License-Identifier: Apache-2.0
"""A key of another system, and what the keys of a config propose together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class ForeignKey:
    """A key of another system."""

    path: str
    """Its place in the config."""
    apply: Callable[[Any, Draft], str]
    """Propose the values that this key stands for. Returns them as text; raises ConfigError if wrong."""
    sets: tuple[str, ...] = ()
    """Paths of the knobs that it may set."""
    meaning: str = ""
    """For the reference, in Markdown; empty if an earlier entry of the table documents both."""
    unique: bool = True
    """Whether verl has no key of this name, so that the name in another place is a mistake."""


@dataclass
class Draft:
    """Values proposed so far, by the paths of their knobs, and the key that proposed each.

    A name that is not a knob's path, such as `require_batches`, is combined with other keys later.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    verl: dict[str, Any] = field(default_factory=dict)
    """Values for verl's own keys, by their paths."""

    def propose(self, name: str, value: Any, source: str) -> None:
        """Record a value. Raises ConfigError if another key proposed a different one."""
        if name in self.values and self.values[name] != value:
            raise ConfigError(
                f"{source} asks for {name}={value} but {self.sources[name]} for {self.values[name]}; keep "
                "one of them"
            )
        self.values[name] = value
        self.sources.setdefault(name, source)
