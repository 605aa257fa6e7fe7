# SPDX-License-Identifier: Apache-2.0
"""Runs are found below a folder, and the ends of their files say how far they are and what looks wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.errors import RunFilesError
from recipe.async_pipeline.tools.report.figures.run_reader import TAIL_BYTES
from recipe.async_pipeline.tools.serve.run_list import find_runs, stamp_of, state_of

NOW = 10_000.0


def write(
    run: Path,
    steps: int,
    *,
    events_ago: float = 1.0,
    steps_ago: float = 1.0,
    summary: dict[str, Any] | None = None,
    save_freq: int = -1,
    **data: float,
) -> Path:
    """Write what a run of steps of 2 s has written, so many seconds ago."""
    run.mkdir(parents=True)
    (run / "settings.json").write_text(json.dumps({"strategy": "fully_async", "staleness.max_lag": 3}))
    (run / "config.json").write_text(json.dumps({"trainer": {"save_freq": save_freq}}))
    row = {"timing_s/step": 2.0, "critic/score/mean": 0.5, "async_pipeline/lag/mean": 1.0, **data}
    lines = [json.dumps({"step": step, "data": row}) for step in range(1, steps + 1)]
    validated = {"async_pipeline/validation/version": steps, "val-core/acc": 1.0}
    lines.append(json.dumps({"step": steps, "data": validated}))
    for name, text, ago in (
        ("events.jsonl", "{}\n", events_ago),
        ("metrics.jsonl", "\n".join(lines) + '\n{"step": ', steps_ago),
    ):
        (run / name).write_text(text)
        os.utime(run / name, (NOW - ago, NOW - ago))
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    return run


def test_runs_have_their_path_as_name(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", 1), write(tmp_path / "of" / "b", 1)
    (tmp_path / "latest").symlink_to(first)
    write(first / "earlier.1", 1)
    assert find_runs(tmp_path) == {"a": first, "of/b": second}
    assert find_runs(first) == {"a": first}
    (tmp_path / "none").mkdir()
    with pytest.raises(RunFilesError, match="none has no run directory"):
        find_runs(tmp_path / "none")


def test_the_ends_of_the_files_say_how_far_a_run_is(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 9)
    found = state_of(run, NOW)
    assert (found.status, found.strategy, found.step, found.written_s) == ("running", "fully_async", 9, 1.0)
    assert (found.step_s, found.reward, found.lag, found.alarms) == (2.0, 0.5, 1.0, ())
    before = stamp_of(run)
    with (run / "events.jsonl").open("a") as events:
        events.write("{}\n")
    assert stamp_of(run) != before

    ended = write(tmp_path / "ended", 9, summary={"status": "completed", "steps": 9}, events_ago=5000.0)
    assert (state_of(ended, NOW).status, state_of(ended, NOW).alarms) == ("completed", ())
    (tmp_path / "new").mkdir()
    new = state_of(tmp_path / "new", NOW)
    assert (new.step, new.step_s, new.reward, new.lag) == (0, None, None, None)


def test_a_large_file_of_metrics_is_read_at_its_end(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 20_000)
    assert (run / "metrics.jsonl").stat().st_size > 4 * TAIL_BYTES
    assert state_of(run, NOW).step == 20_000


@pytest.mark.parametrize(
    ("given", "alarm"),
    [
        (
            {"events_ago": 300.0, "steps_ago": 300.0},
            "it has written nothing for 5.0 min; its process may be gone",
        ),
        ({"steps_ago": 300.0}, "no step has ended for 5.0 min, and one takes 2 s"),
        ({"async_pipeline/lag/mean": 2.8}, "the mean lag of the last 5 steps is 2.80 of 3 allowed"),
        (
            {"async_pipeline/checkpoint/age_steps": 9.0, "save_freq": 4},
            "the last checkpoint is 9 steps old, and trainer.save_freq is 4",
        ),
        ({"summary": {"status": "failed", "error": "Out: of\nmemory"}}, "the run ended: Out: of"),
        (
            {"summary": {"status": "completed", "observers_off": {"events.jsonl": "disk"}}},
            "the observer events.jsonl is off or failing: disk",
        ),
    ],
)
def test_what_looks_wrong_is_an_alarm(tmp_path: Path, given: dict[str, Any], alarm: str) -> None:
    (found,) = state_of(write(tmp_path / "run", 9, **given), NOW).alarms
    assert found.startswith(alarm)
