# SPDX-License-Identifier: Apache-2.0
"""The files of a run that resumes in the directory of an earlier process."""

from __future__ import annotations

import json
from pathlib import Path

from recipe.async_pipeline.observe.run_directory.run_files import rows_until, run_of, set_aside, set_aside_run
from recipe.async_pipeline.tools.run_directory import events_of_steps


def test_set_aside_uses_the_next_free_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert set_aside(path) is None
    for text in "ab":
        path.write_text(text)
        set_aside(path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "events.1.jsonl": "a",
        "events.2.jsonl": "b",
    }


def test_the_records_of_a_run_are_kept_together(tmp_path: Path) -> None:
    assert set_aside_run(tmp_path) is None
    (tmp_path / "pictures").mkdir()
    for name in ("events.jsonl", "events.1.jsonl", "ledger.jsonl", "summary.json", "pictures/1.png"):
        (tmp_path / name).write_text(name)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "run.1.log").touch()
    kept = set_aside_run(tmp_path)
    assert kept == tmp_path / "earlier.1"
    assert (kept / "events.1.jsonl").read_text() == "events.1.jsonl" and (kept / "pictures/1.png").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "earlier.1", "run.1.log"]
    (tmp_path / "ledger.jsonl").touch()
    assert set_aside_run(tmp_path) == tmp_path / "earlier.2"


def test_rows_until_keeps_metrics_up_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    validation = [{"step": 2, "data": {"async_pipeline/validation/version": v}} for v in (1, 2)]
    rows = [
        *({"step": step, "data": {"reward": step}} for step in (1, 2)),
        *validation,
        {"step": 3, "data": {"reward": 3}},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "da')
    assert rows_until(path, 2) == rows[:3], "version 2 is validated again"
    assert rows_until(tmp_path / "none", 2) == []


def test_run_of_returns_the_run_id_of_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert run_of(path) is None
    path.write_text('{"n": 1, "kind": "opened", "run": "r"}\n{"n": 2}\n')
    assert run_of(path) == "r"
    path.write_text("")
    assert run_of(path) is None
    path.write_text("[" * 200_000 + "\n")
    assert run_of(path) is None


def test_the_events_of_a_run_are_the_ones_of_its_last_steps(tmp_path: Path) -> None:
    newest = tmp_path / "events.jsonl"
    assert events_of_steps(tmp_path) == newest
    for number in (1, 2, 10, 11):
        trained = {"event": "TRAINED" if number in (2, 10) else "START"}
        (tmp_path / f"events.{number}.jsonl").write_text(json.dumps(trained) + "\n")
    newest.write_text(json.dumps({"event": "START"}) + "\n")
    assert events_of_steps(tmp_path) == tmp_path / "events.10.jsonl"
    newest.write_text(json.dumps({"event": "TRAINED"}) + "\n")
    assert events_of_steps(tmp_path) == newest
