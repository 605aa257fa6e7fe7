# SPDX-License-Identifier: Apache-2.0
"""Configs that are refused, and the words: `tests/config/refusals.txt`, replayed in `test_refusals.py` there
and, where verl is needed, in `tests/verl_bridge/rules/test_config_checks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from recipe.async_pipeline.errors import ConfigError

FILE = Path(__file__).parent / "config" / "refusals.txt"


class Refused(NamedTuple):
    """A case of the file."""

    line: int
    section: str
    """What is changed, and checked."""
    changes: dict[str, Any]
    message: str
    """Where it has an ellipsis, anything may stand."""

    def replay(self, check: Callable[[dict[str, Any]], object]) -> None:
        """Require that the changes are refused in these words."""
        with pytest.raises(ConfigError) as caught:
            check(self.changes)
        words = ".*".join(map(re.escape, self.message.split("…")))
        assert re.fullmatch(words, str(caught.value), re.DOTALL), f"{FILE.name}:{self.line}: {caught.value}"


def read_cases() -> list[Refused]:
    """Return the cases: changes on a line as YAML, then the message, indented by four spaces."""
    cases: list[Refused] = []
    section = ""
    for number, line in enumerate(FILE.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("["):
            section = line[1:-1]
        elif line.startswith("{"):
            cases.append(Refused(number, section, yaml.safe_load(line), ""))
        elif line.startswith("    "):
            case = cases.pop()
            cases.append(case._replace(message="\n".join(filter(None, (case.message, line[4:])))))
    return cases


CASES = read_cases()


def cases_of(*sections: str) -> pytest.MarkDecorator:
    """Return a mark that gives a test the cases of some sections as `case`."""
    chosen = [case for case in CASES if case.section in sections]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: f"{case.section}-{case.line}")
