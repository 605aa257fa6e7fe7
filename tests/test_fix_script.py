# SPDX-License-Identifier: Apache-2.0
"""`fix.sh` makes each kind of derived file current, and changes nothing that is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import HANG_S, REPOSITORY, tracked_files

DERIVED = (
    "configs/async_pipeline.yaml",
    "docs/configuration.md",
    "patches/contract.json",
    "patches/engines.json",
    "patches/state.json",
    "patches/keys.tsv",
    "contrib/verl_recipe/async_pipeline/REQUIRED_VERL.txt",
    "tests/nightly.tsv",
    "recipe/async_pipeline/errors.py",
)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("verl") is None, reason="the contract is derived from an installed verl")
def test_each_derived_file_is_made_current(tmp_path: Path) -> None:
    for name in tracked_files():
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, copy)
    current = {name: (tmp_path / name).read_bytes() for name in tracked_files()}
    for name in DERIVED:
        path = tmp_path / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if name.endswith(".py"):
            path.write_text("".join(lines).replace(" = ", "  =  "), encoding="utf-8")
        elif name.endswith(".tsv"):
            path.write_text("".join([*lines, lines[-1].replace("2026-", "2025-")]), encoding="utf-8")
        else:
            path.write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    done = subprocess.run(
        ["bash", "run_scripts/fix.sh"],
        cwd=tmp_path,
        env={**os.environ, "ASYNC_PIPELINE_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name, content in current.items() if (tmp_path / name).read_bytes() != content] == []


def test_a_step_that_fails_is_named_and_the_others_run(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "run_scripts", tmp_path / "run_scripts")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *format*|*reference*) exit 1 ;; esac\n', encoding="utf-8")
    python.chmod(0o700)
    done = subprocess.run(
        ["bash", "run_scripts/fix.sh"],
        cwd=tmp_path,
        env={**os.environ, "ASYNC_PIPELINE_PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    steps = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    names = ("lint", "format", "knobs", "contract", "keys", "copies", "docs", "nightly")
    assert steps == [f"== {name}" for name in names]
    # The folder has nothing to copy.
    assert done.returncode == 1 and done.stderr.endswith("failed: format knobs copies\n")
