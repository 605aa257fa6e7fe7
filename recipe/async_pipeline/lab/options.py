# SPDX-License-Identifier: Apache-2.0
"""Command line options from the fields of a msgspec struct: types, defaults, bounds and help."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import msgspec
from msgspec.inspect import FloatType, IntType, Metadata, StructType

from ..errors import ConfigError


class Option(NamedTuple):
    """One field as an option."""

    field: str
    number: IntType | FloatType
    default: Any
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        """The option as the user writes it."""
        return f"--{self.field.replace('_', '-')}"

    def add_to(self, parser: argparse.ArgumentParser, default: Any) -> None:
        """Declare the option; `default` may suppress that of the field, which the help shows."""
        parser.add_argument(
            self.flag,
            type=int if isinstance(self.number, IntType) else float,
            default=default,
            metavar=self.metavar,
            help=f"{self.help} (default: {self.default})",
        )

    def check(self, value: float) -> None:
        """Raise ConfigError if the value is out of the field's bounds."""
        least, above, below = self.number.ge, self.number.gt, self.number.lt
        high_enough = value >= least if least is not None else above is None or value > above
        if high_enough and (below is None or value < below):
            return
        rule = f">= {least:g}" if least is not None else f"> {above:g}"
        if below is not None:
            rule = f"in [{least:g}, {below:g})"
        raise ConfigError(f"{self.flag} must be {rule}, got {value:g}; the default is {self.default:g}")


def options_of(struct: type[msgspec.Struct]) -> list[Option]:
    """Return the options of a struct of numbers, whose titles are the metavars and descriptions the help."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, StructType)
    options = []
    for field in info.fields:
        described = field.type
        assert isinstance(described, Metadata) and isinstance(described.type, IntType | FloatType)
        shown = described.extra_json_schema or {}
        options.append(
            Option(field.name, described.type, field.default, shown["title"], shown["description"])
        )
    return options
