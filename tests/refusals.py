# SPDX-License-Identifier: Apache-2.0
"""What is refused, and the words, in files: configs in `tests/config/refusals.txt`, requests of agents in
`tests/gateway/refusals.txt`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from recipe.async_pipeline.errors import ConfigError

TESTS = Path(__file__).parent


class Refused(NamedTuple):
    """A case of a file."""

    line: int
    section: str
    """What is changed, and checked."""
    changes: dict[str, Any]
    message: str
    """Where it has an ellipsis, anything may stand."""

    def replay(self, check: Callable[[dict[str, Any]], object], error: type[Exception] = ConfigError) -> None:
        """Require that the changes are refused in these words."""
        with pytest.raises(error) as caught:
            check(self.changes)
        words = ".*".join(map(re.escape, self.message.split("…")))
        assert re.fullmatch(words, str(caught.value), re.DOTALL), f"line {self.line}: {caught.value}"


@cache
def read_cases(folder: str) -> list[Refused]:
    """Return the cases: changes on a line as YAML, then the message, indented by four spaces."""
    cases: list[Refused] = []
    section = ""
    lines = (TESTS / folder / "refusals.txt").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("["):
            section = line[1:-1]
        elif line.startswith("{"):
            cases.append(Refused(number, section, yaml.safe_load(line), ""))
        elif line.startswith("    "):
            case = cases.pop()
            cases.append(case._replace(message="\n".join(filter(None, (case.message, line[4:])))))
    return cases


def cases_of(section: str, folder: str = "config") -> pytest.MarkDecorator:
    """Return a mark that gives a test the cases of a section, or of all, as `case`."""
    chosen = [case for case in read_cases(folder) if section in (case.section, "all")]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: f"{case.section}-{case.line}")
