# SPDX-License-Identifier: Apache-2.0
"""The wheel in an empty environment with verl as it was published: a whole job without our patches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.verl_bridge.cpu import fork_worker
from tests.e2e.job import ROOT, check_clean_end, check_events, run_job
from tests.fakes.published_verl import unpacked

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with our wheel, the published verl, and the packages of the stack.

    The stack's editable installs, of a patched verl and of this checkout, are invisible there.
    """
    folder = tmp_path_factory.mktemp("patch-free")
    verl = unpacked(folder)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        ["bash", str(ROOT / "run_scripts" / "wheel.sh"), sys.executable],
        env={**environment, "INTO": str(folder / "venv"), "VERL_TREE": str(verl)},
        check=True,
    )
    return folder / "venv" / "bin" / "python"


def run(python: Path, *arguments: str, folder: Path) -> str:
    """Return what a command of the environment prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_trainer_mode_trains_on_the_published_verl(
    python: Path, tied_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if not forked:  # as with accelerators: each worker imports all that it needs
        monkeypatch.setenv(fork_worker.IMPORTS, "")
    printed = run(python, "-m", "recipe.async_pipeline", "doctor", folder=tmp_path)
    assert "none applied: start with trainer.v1.trainer_mode=async_pipeline" in printed
    assert "without 0001" in printed and "fail" not in printed

    modules = "import verl, recipe.async_pipeline as it; print(verl.__file__); print(it.__file__)"
    verl, ours = map(Path, run(python, "-W", "ignore", "-c", modules, folder=tmp_path).split()[-2:])
    assert not (verl.parent / "trainer" / "ppo" / "pipeline.py").exists(), "verl is patched"
    assert ours.is_relative_to(python.parents[1]), "the package is not the wheel's"

    job = run_job(
        [
            *(str(python), "-m", "verl.trainer.main_ppo"),
            *("--config-path", str(ROOT / "configs"), "--config-name", "smoke_cpu"),
            "trainer.v1.trainer_mode=async_pipeline",
            "trainer.v1.async_pipeline.faults.strict_observers=True",
            "trainer.total_training_steps=4",
            f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
        ],
        tmp_path / "run",
        tied_task,
        python=python,
        cwd=tmp_path,
    )
    check_clean_end(job, "one_step_off", 1, 4)
    check_events(job)


@pytest.mark.nightly
def test_a_mistake_is_named_although_ray_has_started(
    python: Path, tied_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    job = run_job(
        [
            *(str(python), "-m", "verl.trainer.main_ppo"),
            *("--config-path", str(ROOT / "configs"), "--config-name", "smoke_cpu"),
            "trainer.v1.trainer_mode=async_pipeline",
            "trainer.v1.async_pipeline.staleness.max_lag=-1",
        ],
        tmp_path / "run",
        tied_task,
        python=python,
        cwd=tmp_path,
    )
    assert job.status == 1
    named = "status 1: trainer.v1.async_pipeline.staleness.max_lag must be >= 0 and at most 1000, got -1"
    assert named in job.output, "the last line of `watch`"
