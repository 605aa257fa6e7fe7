# SPDX-License-Identifier: Apache-2.0
"""Tables and counts in documents that follow from code. `fix.sh` runs this module; tests compare each.

python -m tests.derived_docs
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from recipe.async_pipeline.gateway.dialects import parameter_table
from recipe.async_pipeline.verl_bridge.replaced import REPLACED
from tests import REPOSITORY
from tests.gateway.test_client_libraries import client_table

README, AGENTS, PATCHES = Path("README.md"), Path("docs", "agents.md"), Path("patches", "README.md")


def counts() -> Mapping[str, int]:
    """Return what the README counts, by the words that follow the number."""
    series = (REPOSITORY / "patches" / "series").read_text("utf-8").splitlines()
    return {
        "small [patches]": sum(bool(line) and not line.startswith("#") for line in series),
        "names of verl, OmegaConf and the engines": sum(map(len, REPLACED.values())),
    }


def with_counts(text: str, counted: Mapping[str, int]) -> str:
    """Return a text with these numbers; words may be on two lines."""
    for words, number in counted.items():
        pattern = r"\s+".join(map(re.escape, words.split()))
        text = re.sub(rf"\d+(\s+{pattern})", rf"{number}\1", text)
    return text


def with_compared(text: str) -> str:
    """Return a text in whose table of engines' trees each row has as many things compared as are recorded."""
    recorded = json.loads((REPOSITORY / "patches" / "engines.json").read_text("utf-8"))
    needs = {name: len(engine["needs"]) for name, engine in recorded.items()}
    return re.sub(
        r"^(\| (vLLM|SGLang) \S+ \| )\d+",
        lambda row: f"{row[1]}{needs[row[2].lower()]}",
        text,
        flags=re.MULTILINE,
    )


def with_table(page: str, table: str) -> str:
    """Return a page with this table in place of the one with the same head. Raises ValueError without one."""
    lines = page.splitlines(keepends=True)
    head = table.splitlines(keepends=True)[0]
    if head not in lines:
        raise ValueError(f"no table of the page begins with {head.strip()}; write its head there")
    start = end = lines.index(head)
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return "".join([*lines[:start], table, *lines[end:]])


def main(root: Path) -> None:
    readme, agents, patches = root / README, root / AGENTS, root / PATCHES
    patches.write_text(with_compared(patches.read_text("utf-8")), encoding="utf-8")
    readme.write_text(with_counts(readme.read_text("utf-8"), counts()), encoding="utf-8")
    page = agents.read_text("utf-8")
    for table in (parameter_table(), client_table()):
        page = with_table(page, table)
    agents.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(Path())
