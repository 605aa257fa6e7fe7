# SPDX-License-Identifier: Apache-2.0
"""Each of these ends the run within a minute: cause on the last screen, status not 0, nothing left behind."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, Job, kill_process_named, processes_of, run_job, smoke_command

pytestmark = pytest.mark.e2e
WITHIN_S = 60.0


def check_ended(job: Job, cause: str) -> None:
    assert job.status not in (0, None)
    assert job.ended_after_event_s is not None, job.output[-3000:]
    assert job.ended_after_event_s < WITHIN_S
    last_screen = "\n".join(job.output.splitlines()[-24:])
    assert cause in last_screen
    assert processes_of(job.run_dir) == []


def long_run(tmp_path: Path) -> list[str]:
    return smoke_command(
        "trainer.total_training_steps=1000", f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}"
    )


def test_a_reward_function_that_raises(tied_task: Path, tmp_path: Path) -> None:
    job = run_job(
        [
            *long_run(tmp_path),
            f"reward.custom_reward_function.path={ROOT / 'tests' / 'e2e' / 'rewards.py'}",
            "reward.custom_reward_function.name=raises",
        ],
        tmp_path / "run",
        tied_task,
        when=lambda line: "samples/s" in line,
    )
    check_ended(job, "ValueError: the judge fell asleep")
    assert job.summary["status"] == "failed"


def test_a_rollout_server_that_dies(tied_task: Path, tmp_path: Path) -> None:
    job = run_job(
        long_run(tmp_path),
        tmp_path / "run",
        tied_task,
        when=lambda line: " 2/1000" in line,
        do=lambda process: kill_process_named("EngineCore", tmp_path / "run"),
    )
    check_ended(job, "EngineDeadError")


def test_ctrl_c(tied_task: Path, tmp_path: Path) -> None:
    def interrupt(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGINT)

    job = run_job(
        long_run(tmp_path), tmp_path / "run", tied_task, when=lambda line: " 2/1000" in line, do=interrupt
    )
    check_ended(job, "interrupted")
    assert job.status == 130
