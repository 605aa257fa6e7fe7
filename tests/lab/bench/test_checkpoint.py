# SPDX-License-Identifier: Apache-2.0
"""The command of the checkpoint benchmark: its overrides, its figures and what follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.lab.bench import checkpoint
from recipe.async_pipeline.lab.bench.checkpoint import (
    READ,
    SAVED,
    CheckpointSize,
    expected,
    figures,
    overrides_of,
)
from recipe.async_pipeline.lab.bench.measuring.spans import MeasuredSpan
from recipe.async_pipeline.lab.bench.runner import JobFailed


def saved(step: int, stall_s: float = 0.1, mib: float = 8) -> MeasuredSpan:
    facts = {"step": step, "held_s": 0.5, "stall_s": stall_s, "own_stall_s": 0.05, "base_bytes": 1 << 30}
    return MeasuredSpan(SAVED, step, step + 2.0, {**facts, "more_bytes": int(mib * 2**20)})


def read(step: int, finished: int, in_flight: int) -> MeasuredSpan:
    facts = {"step": step, "rows": 8, "finished": finished, "in_flight": in_flight, "bytes": 9}
    return MeasuredSpan(READ, 9.0, 9.5, facts)


def test_as_many_prompts_are_measured_as_fit_into_the_memory() -> None:
    assert CheckpointSize(memory_gib=5.0).measured_groups == 20
    assert CheckpointSize(memory_gib=1000.0).measured_groups == CheckpointSize().groups
    assert CheckpointSize(memory_gib=1.0).measured_groups == 1


def test_the_overrides_describe_the_load(tmp_path: Path) -> None:
    lines = overrides_of(CheckpointSize(answers=4, tokens=500), 8, tmp_path)
    for line in (
        "++data.train_batch_size=8",
        "++actor_rollout_ref.rollout.n=4",
        "++trainer.save_freq=1",
        "++trainer.v1.async_pipeline.staleness.max_lag=1",
    ):
        assert line in lines
    assert lines.index("++data.max_response_length=500") > lines.index("++data.max_response_length=16")


def test_the_worst_of_the_full_checkpoints_counts() -> None:
    spans = [
        saved(1),
        saved(2, stall_s=0.3, mib=5),
        saved(3, stall_s=9.0),
        read(1, 500, 500),
        read(2, 520, 480),
    ]
    found = figures(4, [*spans, read(3, 0, 100)])
    assert (found["stall_s"], found["held_s"], found["memory_mib"], found["tokens"]) == (0.3, 0.5, 8.0, 1000)
    assert (found["checkpoints"], found["unreadable"]) == (3, [])


def test_a_checkpoint_that_cannot_be_read_is_named() -> None:
    broken = MeasuredSpan(READ, 9.0, 9.5, {"error": "global_step_1: is damaged"})
    assert figures(4, [saved(1), broken])["unreadable"] == ["global_step_1: is damaged"]
    assert figures(4, [saved(1), read(2, 5, 5)])["unreadable"] == ["step 1 is missing"]


def measured(tokens: int, stall_s: float) -> dict[str, Any]:
    figures = {"stall_s": stall_s, "held_s": 0.5, "memory_mib": 8.0}
    return {"tokens": tokens, "checkpoints": 4, "unreadable": [], **figures}


def test_further_tokens_cost_what_they_cost_in_the_measured_sizes() -> None:
    found = expected([measured(1_000_000, 0.01), measured(3_000_000, 0.03)], 10_000_000)
    assert found["stall_s"] == pytest.approx(0.1)
    assert found["per_million_tokens"]["stall_s"] == pytest.approx(0.01)
    assert (found["held_s"], found["memory_mib"]) == (0.5, 8.0), "which does not depend on tokens"
    alone = expected([measured(1_000_000, 0.01)], 10_000_000)
    assert alone["stall_s"] == pytest.approx(0.1), "one size: all of it is the cost of its tokens"


@pytest.mark.parametrize(("stall_s", "status"), [(0.0, 0), (0.5, 1)])
def test_a_missed_target_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stall_s: float,
    status: int,
) -> None:
    ran: list[int] = []

    def run_job(size: CheckpointSize, groups: int, *rest: Any) -> dict[str, Any]:
        ran.append(groups)
        return measured(groups * 1000, stall_s)

    monkeypatch.setattr(checkpoint, "run_job", run_job)
    out = tmp_path / "c.json"
    assert main(["bench", "checkpoint", "--memory-gib", "5", "--json", str(out)]) == status
    assert ran == [5, 20]
    assert json.loads(out.read_text())["expected"]["tokens"] == 2 * 1024 * 16 * 8000
    assert "extrapolated, 262.1 million" in capsys.readouterr().out


def test_a_failed_job_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_job(*_: Any) -> Any:
        raise JobFailed("status 1")

    monkeypatch.setattr(checkpoint, "run_job", run_job)
    assert main(["bench", "checkpoint", "--logs", str(tmp_path)]) == 1
    assert "failed: status 1" in capsys.readouterr().err
