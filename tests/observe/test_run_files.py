# SPDX-License-Identifier: Apache-2.0
"""The files of a run that resumes in the directory of an earlier process."""

from __future__ import annotations

import json
from pathlib import Path

from recipe.async_pipeline.observe.run_files import rows_until, run_of, set_aside


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
