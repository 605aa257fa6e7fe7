# SPDX-License-Identifier: Apache-2.0
"""A run keeps or sets aside the files of an earlier process in its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.real_engine
ROWS = [{"step": step, "data": {"x": step}} for step in (1, 2, 3)]


class Logger:
    def __init__(self) -> None:
        self.rows: list[tuple[int, Any, Any]] = []

    def log_metrics(self, metrics: Any, step: int, only: Any) -> None:
        self.rows.append((step, metrics, only))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the run `r`, which was killed after step 3."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "ledger.jsonl").write_text(json.dumps({"n": 1, "kind": "open", "run": "r"}) + "\n")
    for name in ("events.jsonl", "config.json", "settings.json", "summary.json", "trace.json", "report.html"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def test_a_resumed_run_keeps_its_ledger_and_the_metrics_up_to_the_checkpoint(
    module: ModuleType, folder: Path
) -> None:
    one, logger = module.RunFolder(folder, "r", 2), Logger()
    one.repeat_rows(logger)
    with one.ledger:
        pass
    assert logger.rows == [(1, {"x": 1}, ["file"]), (2, {"x": 2}, ["file"])]
    assert json.loads((folder / "ledger.jsonl").read_text())["run"] == "r"
    for name in ("config", "settings", "summary"):
        assert not (folder / f"{name}.json").exists() and (folder / f"{name}.1.json").exists()
    assert not (folder / "metrics.jsonl").exists() and not (folder / "events.jsonl").exists()
    assert os.environ["VERL_FILE_LOGGER_PATH"] == str(folder / "metrics.jsonl")


def test_the_ledger_of_another_run_is_set_aside(module: ModuleType, folder: Path) -> None:
    one = module.RunFolder(folder, "another", 2)
    with one.ledger:
        pass
    assert one.rows == []
    assert (folder / "ledger.jsonl").read_text() == ""
    assert len((folder / "metrics.1.jsonl").read_text().splitlines()) == len(ROWS)
    assert [path for path in folder.iterdir() if path.name.startswith("ledger.") and path.stat().st_size]
