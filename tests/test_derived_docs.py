# SPDX-License-Identifier: Apache-2.0
"""Documents that follow from code are written by one command."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests import REPOSITORY, derived_docs
from tests.derived_docs import AGENTS, PATCHES, README, with_counts, with_table

TABLE = "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_stale_documents_become_current(tmp_path: Path) -> None:
    for name in (README, AGENTS, PATCHES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    readme, agents, patches = (tmp_path / name for name in (README, AGENTS, PATCHES))
    stale = re.sub(r"(LLM \S+|Lang \S+) \| \d+", r"\1 | 999", patches.read_text("utf-8"))
    patches.write_text(stale, encoding="utf-8")
    readme.write_text(re.sub(r"\d+ (small|names)", r"999 \1", readme.read_text("utf-8")), encoding="utf-8")
    rows = [
        line for line in agents.read_text("utf-8").splitlines(keepends=True) if "| smolagents" not in line
    ]
    agents.write_text("".join(rows).replace("| all |", "| every |"), encoding="utf-8")
    for name in (README, AGENTS, PATCHES):
        assert (tmp_path / name).read_bytes() != (REPOSITORY / name).read_bytes()

    derived_docs.main(tmp_path)
    for name in (README, AGENTS, PATCHES):
        assert (tmp_path / name).read_bytes() == (REPOSITORY / name).read_bytes()


def test_only_the_table_with_the_same_head_is_replaced() -> None:
    page = f"x\n\n{TABLE}\ny\n\n| c |\n| --- |\n| 3 |\n"
    assert with_table(page, TABLE.replace("1", "7")) == page.replace("| 1 |", "| 7 |")
    with pytest.raises(ValueError, match=r"no table of the page begins with \| d \|; write its head there"):
        with_table(page, "| d |\n")


def test_counted_words_may_be_on_two_lines() -> None:
    assert with_counts("has 3 red\nboxes and 3 discs", {"red boxes": 12}) == "has 12 red\nboxes and 3 discs"
