# SPDX-License-Identifier: Apache-2.0
"""Print the lines of each storey of the package, of the tests and of the configuration, with their targets.

python -m tests.sizes
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests import REPOSITORY, tracked_files

PACKAGE = "recipe/async_pipeline/"
UPPER_STOREYS = (f"{PACKAGE}tools/", f"{PACKAGE}lab/")
CONFIGURATION = (f"{PACKAGE}config/", f"{PACKAGE}verl_bridge/rules/")
BRIDGE = f"{PACKAGE}verl_bridge/"


class Part(NamedTuple):
    """A part of the repository."""

    target: int
    """Lines that it should have at most."""
    has: Callable[[str], bool]
    """Whether a file, named relative to the repository, belongs to it."""


def is_configuration(name: str) -> bool:
    """Return whether a module reads, checks or explains configuration: `config/` and the bridge's rules."""
    own = name.removeprefix(BRIDGE)
    return name.startswith(CONFIGURATION) or (
        own != name and "/" not in own and own.endswith(("_rules.py", "config_checks.py", "spelling.py"))
    )


PARTS: Mapping[str, Part] = {
    "run": Part(45_000, lambda name: name.startswith(PACKAGE) and not name.startswith(UPPER_STOREYS)),
    "tools": Part(12_500, lambda name: name.startswith(UPPER_STOREYS[0])),
    "lab": Part(11_500, lambda name: name.startswith(UPPER_STOREYS[1])),
    "tests": Part(70_000, lambda name: name.startswith("tests/")),
    "config, a part of run": Part(5_000, is_configuration),
}


def lines_of(root: Path, names: list[str]) -> dict[str, int]:
    """Return the number of lines of Python files in each part."""
    lengths = {
        name: len((root / name).read_text(encoding="utf-8").splitlines())
        for name in names
        if name.endswith(".py")
    }
    return {
        title: sum(length for name, length in lengths.items() if part.has(name))
        for title, part in PARTS.items()
    }


def table(lines: Mapping[str, int]) -> str:
    """Return a row for each part: its lines, its target and the difference."""
    rows = [
        f"{title:22}{count:>8,}{PARTS[title].target:>8,}{count - PARTS[title].target:>+9,}"
        for title, count in lines.items()
    ]
    return "\n".join([f"{'part':22}{'lines':>8}{'target':>8}{'over':>9}", *rows])


if __name__ == "__main__":
    sys.stdout.write(table(lines_of(REPOSITORY, tracked_files())) + "\n")
