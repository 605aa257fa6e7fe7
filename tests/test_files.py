# SPDX-License-Identifier: Apache-2.0
"""Tracked files are small and none is ignored or a link; CI calls tiers that exist."""

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
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
TEST_SCRIPT = (REPOSITORY / "run_scripts" / "test.sh").read_text(encoding="utf-8")
TIERS = {"--quick", *(f"--{tier}" for tier in lanes.TIERS)}
PARTS_OF_OTHERS = {"--style", "--checks", "--nightly-part"}


def test_no_ignored_file_is_tracked() -> None:
    """A link to an environment that was committed once replaces the environment of every checkout."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout, so nothing is tracked")
    listed = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    found = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert found.stdout.split() == []


def test_tracked_files_are_small() -> None:
    sizes = {name: (REPOSITORY / name).stat().st_size for name in tracked_files() if name not in LARGE}
    assert {name: size for name, size in sizes.items() if size > MAX_BYTES} == {}


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
