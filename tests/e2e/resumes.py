# SPDX-License-Identifier: Apache-2.0
"""Jobs that are killed and resumed with the same command, and what is compared with a job that was left
alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recipe.async_pipeline.lab.gpu_kit.ladder import LOOP
from recipe.async_pipeline.tools.ledger.file import audit_file
from tests.e2e.job import Job, processes_of, smoke_command
from tests.e2e.weights import saved_weights

STEPS = 6
COMPARED = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")


def kill_all(process: subprocess.Popen[str], run_dir: Path) -> None:
    """The cleaning process is stopped meanwhile and killed last: with it the job counts as ended, and
    the next begins.
    """
    process.send_signal(signal.SIGSTOP)
    while others := {int(line.partition(":")[0]) for line in processes_of(run_dir)} - {process.pid}:
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)


def command(
    folder: Path, strategy: str, *overrides: str, steps: int = STEPS, seeded: bool = True
) -> list[str]:
    """Return the command of a run. `seeded`: with a seeded turn, not the task's loop."""
    agents = folder / "agents.json"
    agents.write_text(json.dumps([{"name": "seeded", "_target_": LOOP}]))
    loop = [
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
    ]
    return smoke_command(
        f"async_strategy={strategy}",
        f"trainer.total_training_steps={steps}",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"trainer.v1.async_pipeline.run_dir={folder / 'run'}",
        *(loop if seeded else []),
        "actor_rollout_ref.actor.optim.lr=6.0e-4",
        *overrides,
    )


def ended_well(job: Job, steps: int = STEPS, groups: int = 16) -> dict[str, Any]:
    assert job.status == 0, job.output[-3000:]
    found = audit_file(job.run_dir)
    assert found.violations == []
    trained = steps * groups
    assert (found.status, found.steps, found.trained, found.in_flight) == ("completed", steps, trained, 0)
    summary = job.summary
    assert (summary["status"], summary["steps"], summary["groups_trained"]) == (
        "completed",
        steps,
        trained,
    )
    assert (summary["checkpoint_last"], summary["checkpoints_failed"]) == (steps, 0)
    return summary


def weights(folder: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    return saved_weights(folder / "checkpoints", steps)


def losses(job: Job, compared: Sequence[str] = COMPARED) -> list[dict[str, float]]:
    rows = [row["data"] for row in job.metrics() if "actor/pg_loss" in row["data"]]
    return [{name: row[name] for name in compared} for row in rows]
