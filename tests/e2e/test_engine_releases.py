# SPDX-License-Identifier: Apache-2.0
"""Other releases of the engines than the locked ones, as real engines in their own environments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import REPOSITORY
from tests.e2e.job import check_clean_end, check_events, run_job, smoke_command

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
RELEASES = sorted(path.stem for path in (REPOSITORY / "run_scripts" / "engines").glob("*.txt"))
LACKS = {
    "vllm-0.24": ("packs experts at its first load", "no table of a drafter's names", "never scales pixels")
}
"""Why tests of a release are skipped that a run needs."""
OTHER_MODELS = {"vllm": ("in another way", "packs fp8 weights"), "sglang": ()}
"""Why tests of single models, or of fp8, may be skipped with releases other than the default one."""
REFUSED = {"sglang-0.5.23": "ServerArgs.model_path is missing"}
"""Releases that verl's own server cannot start, and what the refusal says."""
STEPS = 5


class Release(NamedTuple):
    name: str
    python: Path
    """The interpreter of its environment."""

    @property
    def engine(self) -> str:
        return self.name.partition("-")[0]


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    """Return a release, whose environment is made on first use."""
    name: str = request.param
    setup = REPOSITORY / "run_scripts" / "setup.sh"
    done = subprocess.run(
        ["bash", str(setup), "--engine", name], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Release(name, REPOSITORY / ".cache" / "venvs" / name / "bin" / "python")


def test_adapter_layout_and_proof_pass(release: Release) -> None:
    """The engine tests, with real engines and the engine's own models and loaders."""
    chosen = ["-m", "real_engine and not nightly", f"tests/verl_bridge/rollout/{release.engine}"]
    done = subprocess.run(
        [str(release.python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *chosen],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    lacks = LACKS.get(release.name, ())
    assert " passed" in done.stdout and all(any(one in line for line in skipped) for one in lacks), skipped
    may = (*lacks, *OTHER_MODELS[release.engine])
    assert all(any(one in line for one in may) for line in skipped), skipped


def test_a_job_trains(release: Release, tied_task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # A release that lacks something is refused otherwise.
    check = ["trainer.v1.async_pipeline.engine_check=warn"] if release.name in LACKS else []
    command = smoke_command(
        f"actor_rollout_ref.rollout.name={release.engine}",
        "async_strategy=one_step_off",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.v1.async_pipeline.run_dir={run_dir}",
        *check,
    )
    command[0] = str(release.python)
    job = run_job(command, run_dir, tied_task, python=release.python)
    if release.name in REFUSED:
        assert job.status != 0 and REFUSED[release.name] in job.output and "Ray: starts" not in job.output
        return
    check_clean_end(job, "one_step_off", 1, STEPS)
    check_events(job)
