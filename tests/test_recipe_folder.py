# SPDX-License-Identifier: Apache-2.0
"""The folder for verl's collection of recipes requires our package, and its script would start a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline import __version__
from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.config.paths import MODE, PATCH_FREE
from tests import REPOSITORY
from tests.conftest import Load

FOLDER = REPOSITORY / "contrib" / "verl_recipe" / "async_pipeline"
SCRIPT = FOLDER / "run_qwen3_8b_fsdp_vllm.sh"


def test_it_requires_this_version_of_the_package() -> None:
    lines = (FOLDER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == [f"async_pipeline=={__version__}"]


def test_it_requires_the_same_verl() -> None:
    ours = REPOSITORY / "recipe" / "async_pipeline" / "REQUIRED_VERL.txt"
    assert (FOLDER / "REQUIRED_VERL.txt").read_bytes() == ours.read_bytes(), "run `bash run_scripts/fix.sh`"


def test_it_does_not_hide_the_package(tmp_path: Path) -> None:
    """With verl's folder of recipes first on the path, `recipe.async_pipeline` is the installed package."""
    (tmp_path / "recipe").symlink_to(FOLDER.parent)
    found = subprocess.run(
        [sys.executable, "-c", "import recipe.async_pipeline as it; print(it.__file__)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert Path(found.stdout.strip()) == REPOSITORY / "recipe" / "async_pipeline" / "__init__.py"


def test_its_readme_has_the_sections_of_a_recipe() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    sections = [line.removeprefix("## ") for line in readme.splitlines() if line.startswith("## ")]
    assert sections == ["Installation", "Training", "Evaluation", "Citation"]


@pytest.mark.real_engine
def test_its_script_would_start(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tmp_path / "words"
    standin = tmp_path / "python"
    standin.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{words}'\n", encoding="utf-8")
    standin.chmod(0o700)
    subprocess.run(
        ["bash", str(SCRIPT), "trainer.total_epochs=1"],
        env={**os.environ, "ASYNC_PIPELINE_PYTHON": str(standin)},
        check=True,
    )
    entry, overrides = words.read_text(encoding="utf-8").splitlines()[:2], words.read_text().splitlines()[2:]
    assert entry == ["-m", "verl.trainer.main_ppo"]
    assert f"{MODE}={PATCH_FREE}" in overrides and overrides[-1] == "trainer.total_epochs=1"
    load("verl")
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *overrides]) == 0
    printed = capsys.readouterr().out
    assert "one_step_off" in printed and "2 replicas of 2 devices" in printed
