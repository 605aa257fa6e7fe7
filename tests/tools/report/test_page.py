# SPDX-License-Identifier: Apache-2.0
"""The page of a run: complete, self-contained, with the right numbers, and partial if files are missing."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipe.async_pipeline.observe.account.accounting import Accounting
from recipe.async_pipeline.tools.report.figures.data import RunData, data_of
from recipe.async_pipeline.tools.report.figures.run_reader import read_run
from recipe.async_pipeline.tools.report.page import advice_list, figures_of, run_page
from tests.observe.run_folder import RecordedTrainer, write_run
from tests.tools.report.pages import check

SECTIONS = ["advice", "timeline", "devices", "steps", "learning", "freshness", "queues", "weights", "samples"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = RecordedTrainer(
        max_lag=1,
        steps=12,
        places={"ref_logp": "ref"},
        costs={"validate": 0.5, "draw": 0.1},
        filtered=lambda uid: uid.endswith(".2"),
    )
    path = write_run(tmp_path_factory.mktemp("runs") / "run", trainer)
    rows = (path / "metrics.jsonl").read_text()
    row = {"step": 6, "data": {"async_pipeline/validation/version": 6, "val-core/toy/reward/mean@1": 0.4}}
    (path / "metrics.jsonl").write_text(rows + json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> RunData:
    return data_of(read_run(folder))


def test_the_page_is_complete_and_self_contained(run: RunData) -> None:
    page = check(run_page(run))
    assert [attrs["id"] for attrs in page.all("section")] == SECTIONS
    assert "validation: toy/reward/mean@1" in page.texts
    met = check(run_page(dataclasses.replace(run, engine="vLLM 0.28.0, model runner V2"))).texts
    assert "vLLM 0.28.0, model runner V2" in met
    assert run.accounting is not None
    shown = [
        float(text.replace(",", ""))
        for text in page.texts
        if "." in text and text.replace(",", "").replace(".", "").isdigit()
    ]
    for pool in run.accounting.pools.values():
        largest = max(pool.seconds.values())
        assert any(value == pytest.approx(largest, abs=0.06) for value in shown), (
            "device-seconds are in the table"
        )


def test_tiles_show_the_numbers_of_the_run_with_units(run: RunData) -> None:
    figures = figures_of(run)
    assert list(figures) == ["Step time", "Throughput", "Overlap efficiency", "Devices idle", "Lag", "Reward"]
    assert run.accounting is not None
    assert figures["Devices idle"].number == f"{run.accounting.bubble_ratio:.0%}"
    assert figures["Step time"].text.endswith(" s") and figures["Throughput"].text.endswith(" samples/s")
    assert "at most 1 of 1 allowed" in figures["Lag"].meaning
    html = run_page(run)
    assert f"<b>{figures['Throughput'].number} <small>samples/s</small></b>" in html, "the unit is smaller"
    assert all(f"<dt>{name}</dt>" in html and tile.number in html for name, tile in figures.items())


def test_a_run_without_a_step_has_no_efficiency(run: RunData) -> None:
    assert "Overlap efficiency" in figures_of(run)
    assert figures_of(replace(run, steps=0)).keys().isdisjoint({"Overlap efficiency", "Devices idle"})


def test_missing_files_are_named_and_the_rest_is_shown(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text())
    page = check(run_page(data_of(read_run(tmp_path))))
    assert [attrs["id"] for attrs in page.all("section")] == ["advice", "learning", "freshness"]
    assert "This report is partial." in page.texts
    assert any(text.startswith("events.jsonl does not exist") for text in page.texts)


def test_a_run_of_events_alone_is_shown(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text((folder / "events.jsonl").read_text())
    page = check(run_page(data_of(read_run(tmp_path))))
    assert {"timeline", "devices", "steps", "queues", "weights"} <= {
        attrs["id"] for attrs in page.all("section")
    }


def test_an_error_is_shown_escaped(run: RunData) -> None:
    page = check(run_page(replace(run, status="failed", error="RolloutError: <b>no responses</b>")))
    assert "RolloutError: <b>no responses</b>" in page.texts


def test_runs_with_few_steps_or_no_events_get_no_advice(run: RunData) -> None:
    assert "Advice needs 5 steps; this run has 0." in advice_list(
        [], replace(run, accounting=_without_steps(run))
    )
    assert "Advice needs events.jsonl" in advice_list([], replace(run, accounting=None))
    assert "No advice." in advice_list([], run)


def _without_steps(run: RunData) -> Accounting:
    assert run.accounting is not None
    return replace(run.accounting, steps=())


def test_a_crashed_run_is_shown_up_to_its_last_event(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    for upto in (1, 12, len(lines) // 3, len(lines) - 3):
        (tmp_path / "events.jsonl").write_text("".join(lines[:upto]))
        check(run_page(data_of(read_run(tmp_path))))
