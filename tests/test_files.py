# SPDX-License-Identifier: Apache-2.0
"""Tracked files end in one newline, have no trailing whitespace and are small; CI calls tiers that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import REPOSITORY, lanes, tracked_files

MAX_BYTES = 300_000
LARGE = {"run_scripts/cpu.lock.txt"}
MAX_LINES = 400
"""Of a module of the package: more than one idea rarely fits into fewer."""
MAX_LINES_OF_A_CLASS = 700
"""Of a module with one class: to cut a class by its length makes it harder to read."""
BINARY = {".png"}
VERBATIM = {".patch"}
"""An empty context line of a diff is one space."""

TEXT = [name for name in tracked_files() if Path(name).suffix not in BINARY]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
TEST_SCRIPT = (REPOSITORY / "run_scripts" / "test.sh").read_text(encoding="utf-8")
TIERS = {"--quick", *(f"--{tier}" for tier in lanes.TIERS)}
PARTS_OF_OTHERS = {"--style", "--checks"}


def test_no_ignored_file_is_tracked() -> None:
    """A link to an environment that was committed once replaces the environment of every checkout."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout, so nothing is tracked")
    listed = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    found = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert found.stdout.split() == []


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


def test_tracked_files_are_small() -> None:
    sizes = {name: (REPOSITORY / name).stat().st_size for name in tracked_files() if name not in LARGE}
    assert {name: size for name, size in sizes.items() if size > MAX_BYTES} == {}


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


def test_no_link_is_tracked() -> None:
    """A tracked link named as an ignored folder replaces that folder wherever the commit is checked out."""
    assert [name for name in tracked_files() if (REPOSITORY / name).is_symlink()] == []


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_parse_and_call_tiers_that_exist(file: Path) -> None:
    workflow: dict[Any, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    # YAML 1.1 reads the key `on` as a boolean.
    assert {"name", True, "permissions", "jobs"} <= set(workflow)
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for script in re.findall(r"bash (\S+)", step.get("run", "")):
                assert (REPOSITORY / script).is_file()
            for options in re.findall(r"test\.sh((?: --[\w-]+)+)", step.get("run", "")):
                assert set(options.split()) <= TIERS


def test_every_tier_is_documented_and_run_by_a_workflow() -> None:
    called = " ".join(file.read_text(encoding="utf-8") for file in WORKFLOWS)
    for tier in TIERS - PARTS_OF_OTHERS - {"--quick"}:
        assert f"test.sh {tier}" in called, f"no workflow runs {tier}"
    for tier in TIERS:
        assert re.search(rf"^#.*{tier}\b", TEST_SCRIPT, re.MULTILINE)
