# SPDX-License-Identifier: Apache-2.0
"""Text files end in one newline and have no trailing whitespace; modules are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import REPOSITORY, tracked_files

pytestmark = pytest.mark.style

MAX_LINES = 400
"""Of a module of the package: more than one idea rarely fits into fewer."""
MAX_LINES_OF_A_CLASS = 700
"""Of a module with one class: to cut a class by its length makes it harder to read."""
BINARY = {".png"}
VERBATIM = {".patch"}
"""An empty context line of a diff is one space."""

TEXT = [name for name in tracked_files() if Path(name).suffix not in BINARY]


def test_text_files_end_in_one_newline() -> None:
    wrong = []
    for name in TEXT:
        data = (REPOSITORY / name).read_bytes()
        if data and (not data.endswith(b"\n") or data.endswith(b"\n\n") or b"\r" in data):
            wrong.append(name)
    assert not wrong


def test_no_line_ends_in_whitespace() -> None:
    wrong = [
        f"{name}:{number}"
        for name in TEXT
        if Path(name).suffix not in VERBATIM
        for number, line in enumerate((REPOSITORY / name).read_bytes().split(b"\n"), start=1)
        if line.endswith((b" ", b"\t"))
    ]
    assert not wrong


def test_modules_of_the_package_are_short() -> None:
    def limit(text: str) -> int:
        classes = len(re.findall(r"^class ", text, re.MULTILINE))
        return MAX_LINES_OF_A_CLASS if classes == 1 else MAX_LINES

    texts = {
        name: (REPOSITORY / name).read_text(encoding="utf-8")
        for name in TEXT
        if name.startswith("recipe/") and name.endswith(".py")
    }
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: lines for name, lines in lengths.items() if lines > limit(texts[name])} == {}
