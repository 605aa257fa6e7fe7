# SPDX-License-Identifier: Apache-2.0
"""Episodes in environments that fail cost an attempt each, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.observe.ledger_file import audit_file
from tests.e2e.environments import KINDS
from tests.e2e.job import check_clean_end, check_events, processes_of, run_job, smoke_command

pytestmark = pytest.mark.e2e
AGENTIC = "trainer.v1.async_pipeline.agentic"


def test_environments_that_fail_cost_one_attempt_each(lake_task: Path, tmp_path: Path) -> None:
    marks, run_dir, steps = tmp_path / "marks", tmp_path / "run", 4
    marks.mkdir()
    job = run_job(
        smoke_command(
            "+task=lake",
            "async_strategy=fully_async",
            f"trainer.total_training_steps={steps}",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            f"trainer.v1.async_pipeline.run_dir={run_dir}",
            f"{AGENTIC}.environment=tests.e2e.environments:FailingLake",
            f"+{AGENTIC}.environment_kwargs.marks={marks}",
            f"{AGENTIC}.isolation=process",
            # Each of them is a process that imports gymnasium.
            f"{AGENTIC}.concurrency=6",
            f"{AGENTIC}.env_timeout_s=20",
        ),
        run_dir,
        lake_task,
    )
    summary = check_clean_end(job, "fully_async", 3, steps)
    check_events(job)
    assert processes_of(run_dir) == [], "no environment is left"

    failed = Counter(mark.name.partition("-")[0] for mark in marks.iterdir())
    assert set(failed) == set(KINDS), "each kind of failure happened"
    audited = audit_file(run_dir)
    assert (audited.status, audited.violations) == ("completed", [])
    assert audited.episodes_repeated == failed.total(), "each failure cost one attempt"
    assert summary["groups_failed"] == 0, "and no group"
    drift = [row["data"]["async_pipeline/drift/max"] for row in job.metrics() if _compared(row)]
    assert drift and max(drift) < 1e-4, "the trainer sees the tokens that the engine wrote, in every turn"
    ended = sum(row["data"].get("async_pipeline/agentic/again", 0) for row in job.metrics())
    assert 0 < ended <= failed.total()


def _compared(row: Mapping[str, Any]) -> bool:
    return "async_pipeline/drift/max" in row["data"]
