# SPDX-License-Identifier: Apache-2.0
"""Other releases of vLLM than the locked one, as real engines in their own environments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.e2e.job import check_clean_end, check_events, run_job, smoke_command

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
RELEASES = sorted(path.stem for path in (REPOSITORY / "run_scripts" / "engines").glob("vllm-*.txt"))
STEPS = 5


@pytest.fixture(scope="module", params=RELEASES)
def interpreter(request: pytest.FixtureRequest) -> Path:
    """Return the interpreter of a release's environment, which is made on first use."""
    release: str = request.param
    setup = REPOSITORY / "run_scripts" / "setup.sh"
    done = subprocess.run(
        ["bash", str(setup), "--engine", release], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return REPOSITORY / ".cache" / "engines" / release / "bin" / "python"


def test_adapter_layout_and_proof_pass(interpreter: Path) -> None:
    """The engine tests of vLLM, with real engines and vLLM's own models and loaders."""
    chosen = ["-m", "real_engine and not nightly", "tests/verl_bridge/rollout/vllm"]
    done = subprocess.run(
        [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-500:]


def test_a_job_trains(interpreter: Path, tied_task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = smoke_command(
        "async_strategy=one_step_off",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.v1.async_pipeline.run_dir={run_dir}",
    )
    command[0] = str(interpreter)
    job = run_job(command, run_dir, tied_task, python=interpreter)
    check_clean_end(job, "one_step_off", 1, STEPS)
    check_events(job)
