# SPDX-License-Identifier: Apache-2.0
"""Two runs are compared step by step, and a difference above the tolerance fails the step.

The runs themselves are compared by tests/e2e/test_ladder.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.gpu_kit import ladder
from recipe.async_pipeline.lab.gpu_kit.ladder import COMPARED, STEPS, STOCK, differences, main, metrics_in

Steps = list[dict[str, float]]


def steps_of(**changes: float) -> Steps:
    """The metrics of a run; `changes` add to a metric of the last step, by the end of its name."""
    steps: Steps = [{name: 10.0 * (1 + at) for name in COMPARED} for at in range(STEPS)]
    for end, change in changes.items():
        (name,) = (one for one in COMPARED if one.endswith(end))
        steps[-1][name] += change
    return steps


def test_differences_are_relative_to_the_sync_trainers_value() -> None:
    found = differences(steps_of(), steps_of(pg_loss=0.3, grad_norm=-0.6))
    assert found == pytest.approx(
        {**dict.fromkeys(COMPARED, 0.0), "actor/pg_loss": 0.01, "actor/grad_norm": 0.02}
    )
    small = [{**dict.fromkeys(COMPARED, 0.0), "actor/pg_loss": value} for value in (1e-6, 3e-6)]
    assert differences(small[:1], small[1:])["actor/pg_loss"] == pytest.approx(2e-6)


@pytest.mark.parametrize(("sync", "on_policy"), [([], []), (steps_of(), steps_of()[1:])])
def test_runs_of_different_lengths_cannot_be_compared(sync: Steps, on_policy: Steps) -> None:
    with pytest.raises(ValueError, match=f"has made {len(sync)} steps, on_policy {len(on_policy)}"):
        differences(sync, on_policy)


def write(file: Path, steps: Steps) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"step": 0, "data": {"val-core/reward": 0.1}}, *({"step": 1, "data": one} for one in steps)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_only_steps_are_compared(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", steps_of())
    assert metrics_in(tmp_path / "metrics.jsonl") == steps_of()


@pytest.mark.parametrize(("change", "status"), [(0.0, 0), (1e-5, 0), (1e-2, 1), (math.nan, 1)])
def test_the_status_says_whether_the_runs_agree(
    change: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = []

    def train(folder: Path, *settings: str) -> int:
        commands.append(settings)
        pipeline = "+async_pipeline=True" in settings
        file = folder / "run" / "metrics.jsonl" if pipeline else folder / "toy" / f"{STOCK}.jsonl"
        write(file, steps_of(grad_norm=change) if pipeline else steps_of())
        return 0

    monkeypatch.setattr(ladder, "train", train)
    written, folder = tmp_path / "ladder.json", tmp_path / "runs"
    limits = ["--folder", str(folder), "--tolerance", "1e-6", "--json", str(written)]
    assert main([*limits, "--", "--config-name", "train", "trainer.nnodes=1"]) == status

    found = json.loads(written.read_text())
    assert found["steps"] == STEPS and set(found["differences"]) == set(COMPARED)
    assert ("actor/grad_norm differs by" in capsys.readouterr().out) is bool(status)
    sync, on_policy = commands
    assert "actor_rollout_ref.rollout.nnodes=0" in sync and "+async_strategy=on_policy" in on_policy
    assert set(sync) & set(on_policy) >= {"--config-name", "train", "trainer.nnodes=1"}
    (loop,) = json.loads((folder / "agents.json").read_text())
    assert loop == {"name": "seeded", "_target_": ladder.LOOP}


@pytest.mark.parametrize(("failing", "trainer"), [(1, "verl's sync trainer"), (2, "on_policy")])
def test_a_run_that_fails_ends_the_comparison_with_one_line(
    failing: int,
    trainer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    statuses = iter([0] * (failing - 1) + [3])
    monkeypatch.setattr(ladder, "train", lambda folder, *settings: next(statuses))
    written = tmp_path / "ladder.json"
    limits = ["--folder", str(tmp_path / "runs"), "--tolerance", "1e-6", "--json", str(written)]
    assert main([*limits, "--", "trainer.nnodes=1"]) == 1
    said = f"the run with {trainer} ended with status 3, so there is nothing to compare\n"
    assert capsys.readouterr().out == said and not written.exists() and not list(statuses)
